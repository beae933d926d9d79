"""Plans for desired vGPUs remove and create as few vGPUs as possible, and never a vGPU in use."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, PciId, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, Platform
from gpuvirt.facts.vgpu import Framework, GpuModes, LiveVgpu, SmiReport, VgpuHost
from gpuvirt.model.change import planner
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import CreateVgpu, EnableVfs, RemoveVgpu
from gpuvirt.model.change.vgpus.gpustate import GpuState, host_namespace
from gpuvirt.model.change.vgpus.vgpuplanning import no_host, plan_gpu, plan_vgpus
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath

GPU = PciAddress("0000:65:00.0")
VFS = [PciAddress(f"0000:65:{number // 8:02x}.{number % 8}") for number in range(4, 36)]
A10_4Q, A10_8Q, A10_12Q, A10_12C = (VgpuType(f"NVIDIA A10-{name}") for name in ("4Q", "8Q", "12Q", "12C"))
MOST = {A10_4Q: 6, A10_8Q: 3, A10_12Q: 2, A10_12C: 2}
SIZES = {A10_4Q: 4, A10_8Q: 8, A10_12Q: 12, A10_12C: 12}


def gpu_state(*slots: PciAddress, framework: Framework = Framework.MDEV) -> GpuState:
    """Return an empty A10 whose vGPUs have these functions as parents."""
    return GpuState(VgpuHost(GPU, framework, {parent: dict.fromkeys(MOST, 1) for parent in slots}), most=MOST)


def after(one: GpuState, plan: VgpuPlan) -> GpuState:
    """Return the GPU state after a plan; fail where no real GPU would execute it."""
    live = {vgpu.id: vgpu for vgpu in one.host.live}
    for step in plan.steps:
        if isinstance(step, RemoveVgpu):
            assert step.vgpu not in one.users, "the vGPU is in use"
            assert live.pop(step.vgpu).parent == step.parent
        else:
            assert isinstance(step, CreateVgpu)
            assert step.vgpu not in live
            beside = {SIZES[vgpu.type] for vgpu in live.values() if isinstance(vgpu.type, str)}
            assert beside <= {SIZES[step.type]}
            assert len(live) < MOST[step.type]
            assert step.parent == GPU or step.parent not in {vgpu.parent for vgpu in live.values()}
            live[step.vgpu] = LiveVgpu(step.vgpu, step.type, step.parent, None)
    return replace(one, host=replace(one.host, live=tuple(live.values())))


def with_vgpus(one: GpuState, desired: Mapping[VgpuType, int]) -> GpuState:
    return after(one, plan_vgpus(one, desired))


def counts(one: GpuState) -> Counter[str]:
    return Counter(str(vgpu.type) for vgpu in one.host.live)


def used(one: GpuState, *ids: VgpuId) -> GpuState:
    return replace(one, users=dict.fromkeys(ids, ("pod default/vm-a",)))


def made(plan: VgpuPlan) -> dict[VgpuId, PciAddress]:
    return {step.vgpu: step.parent for step in plan.steps if isinstance(step, CreateVgpu)}


def codes(plan: VgpuPlan) -> list[ReasonCode]:
    return [reason.code for reason in (*plan.refusals, *plan.pending)]


EMPTY = [gpu_state(GPU), gpu_state(*VFS), gpu_state(*VFS, framework=Framework.VENDOR_VFIO)]
BOARDS = pytest.mark.parametrize("empty", EMPTY, ids=["on the GPU", "on VFs", "vendor VFIO"])
SPEC_FIELDS: list[dict[VgpuType, int]] = [
    {},
    {A10_4Q: 6},
    {A10_4Q: 1},
    {A10_8Q: 3},
    {A10_12Q: 2},
    {A10_12Q: 1, A10_12C: 1},
]


@BOARDS
def test_configs_of_the_gpu_operator_guide(empty: GpuState) -> None:
    """The GPU Operator's guide: two A10-12Q, then six A10-4Q, then three A10-8Q."""
    one = with_vgpus(empty, {A10_12Q: 2})
    assert counts(one) == {A10_12Q: 2}
    one = with_vgpus(one, {A10_4Q: 6})
    assert counts(one) == {A10_4Q: 6}
    assert counts(with_vgpus(one, {A10_8Q: 3})) == {A10_8Q: 3}


@given(st.sampled_from(EMPTY), st.lists(st.sampled_from(SPEC_FIELDS), min_size=1, max_size=4), st.data())
def test_every_plan_reaches_the_desired_vgpus_and_keeps_vgpus_in_use(
    empty: GpuState, desired_by_gpu: list[dict[VgpuType, int]], data: st.DataObject
) -> None:
    one = empty
    for desired in desired_by_gpu:
        ids = [vgpu.id for vgpu in one.host.live]
        one = used(one, *data.draw(st.sets(st.sampled_from(ids)) if ids else st.just(set())))
        plan = plan_vgpus(one, desired)
        assert plan.refusals == ()
        one = after(one, plan)  # asserts that no step touches a vGPU in use
        again = plan_vgpus(one, desired)
        assert again.steps == (), "after a plan the next plan is empty"
        assert {reason.code for reason in again.pending} <= {ReasonCode.VGPU_IN_USE}
        one = with_vgpus(used(one), desired)
        assert counts(one) == desired, "when all vGPUs are free"
        assert plan_vgpus(one, desired).met


@given(st.sampled_from(EMPTY), st.sampled_from(SPEC_FIELDS))
def test_a_desired_state_creates_the_same_ids_on_the_same_host(empty: GpuState, desired: dict[VgpuType, int]) -> None:
    assert with_vgpus(empty, desired) == with_vgpus(empty, desired)
    other = replace(empty, namespace=host_namespace("another host"))
    if desired and empty.host.framework is Framework.MDEV:
        assert not {vgpu.id for vgpu in with_vgpus(empty, desired).host.live} & {
            vgpu.id for vgpu in with_vgpus(other, desired).host.live
        }


@BOARDS
def test_a_changed_count_leaves_the_other_vgpus_alone(empty: GpuState) -> None:
    four = with_vgpus(empty, {A10_4Q: 4})
    six = plan_vgpus(four, {A10_4Q: 6})
    assert [type(step) for step in six.steps] == [CreateVgpu, CreateVgpu]
    three = plan_vgpus(four, {A10_4Q: 3})
    assert [type(step) for step in three.steps] == [RemoveVgpu]


@BOARDS
def test_free_vgpus_are_removed_before_vgpus_in_use(empty: GpuState) -> None:
    four = with_vgpus(empty, {A10_4Q: 4})
    busy = four.host.live[0].id
    plan = plan_vgpus(used(four, busy), {A10_4Q: 1})
    assert len(plan.steps) == 3
    assert busy not in {step.vgpu for step in plan.steps if isinstance(step, RemoveVgpu)}
    assert plan.pending == ()


@BOARDS
def test_a_used_vgpu_of_another_size_is_waited_for_and_named(empty: GpuState) -> None:
    two = with_vgpus(empty, {A10_12Q: 2})
    plan = plan_vgpus(used(two, two.host.live[0].id), {A10_4Q: 6})
    assert [type(step) for step in plan.steps] == [RemoveVgpu]
    assert codes(plan) == [ReasonCode.VGPU_IN_USE]
    assert "pod default/vm-a" in plan.pending[0].text
    mixed = replace(used(two, two.host.live[0].id), smi=SmiReport(GpuModes(GPU, mixed_sizes=True)))
    assert {type(step) for step in plan_vgpus(mixed, {A10_4Q: 2}).steps} == {RemoveVgpu, CreateVgpu}


def test_a_vgpu_of_another_program_is_adopted_with_its_id() -> None:
    foreign = LiveVgpu(VgpuId("b8f0fd4e-2a0d-4b3e-9a52-2f6a1c1d7a11"), A10_12Q, GPU, None)
    one = gpu_state(GPU)
    one = replace(one, host=replace(one.host, live=(foreign,)))
    plan = plan_vgpus(one, {A10_12Q: 2})
    assert [type(step) for step in plan.steps] == [CreateVgpu]
    assert plan_vgpus(one, {A10_12Q: 1}).met


@BOARDS
def test_after_a_reboot_the_ids_that_pods_were_given_exist_again(empty: GpuState) -> None:
    """The kubelet restarts containers with the stored allocation, which contains the ids."""
    before = with_vgpus(empty, {A10_4Q: 6})
    had = before.host.live[4]
    assert isinstance(had.type, str)
    plan = plan_vgpus(replace(empty, remembered={had.id: had.type}), {A10_4Q: 2})
    assert made(plan)[had.id] == had.parent
    assert len(made(plan)) == 2


def test_an_id_that_another_program_chose_is_restored_after_a_reboot() -> None:
    chosen = VgpuId("b8f0fd4e-2a0d-4b3e-9a52-2f6a1c1d7a11")
    plan = plan_vgpus(replace(gpu_state(*VFS), remembered={chosen: A10_4Q}), {A10_4Q: 1})
    assert list(made(plan)) == [chosen]


def test_a_vgpu_that_another_program_is_removing_still_takes_its_capacity() -> None:
    """Sysfs hides an mdev in use as soon as its removal starts, but the mdev still takes its share of the GPU."""
    two = with_vgpus(gpu_state(GPU), {A10_12Q: 2})
    shown, hidden = two.host.live
    one = replace(two, host=replace(two.host, live=(shown,)), leaving={hidden.id: A10_12Q})
    plan = plan_vgpus(one, {A10_12Q: 2})
    assert plan.steps == ()
    assert codes(plan) == [ReasonCode.UNBIND_PENDING]


@pytest.mark.parametrize(
    ("desired", "code"),
    [
        ({A10_4Q: 7}, ReasonCode.NO_ROOM),
        ({A10_12Q: 2, A10_12C: 1}, ReasonCode.NO_ROOM),
        ({A10_4Q: 1, A10_12Q: 1}, ReasonCode.SIZES_DIFFER),
    ],
)
def test_an_impossible_desired_state_is_refused_before_any_removal(
    desired: dict[VgpuType, int], code: ReasonCode
) -> None:
    plan = plan_vgpus(with_vgpus(gpu_state(GPU), {A10_8Q: 3}), desired)
    assert (plan.steps, codes(plan)) == ((), [code])


def test_too_few_vfs_are_reported() -> None:
    plan = plan_vgpus(gpu_state(*VFS[:4]), {A10_4Q: 6})
    assert (plan.steps, codes(plan)) == ((), [ReasonCode.NO_ROOM])
    one = gpu_state(*VFS[:7])
    one = replace(one, host=replace(one.host, quarantined={VFS[0]: "EIO", VFS[1]: "EIO"}))
    assert codes(plan_vgpus(one, {A10_4Q: 6})) == [ReasonCode.NO_ROOM]
    assert not {VFS[0], VFS[1]} & set(made(plan_vgpus(one, {A10_4Q: 5})).values())


def test_an_unread_attribute_changes_nothing() -> None:
    odd = Unread(HostPath("/sys/bus/mdev/devices"), errno=5)
    one = with_vgpus(gpu_state(GPU), {A10_8Q: 3})
    unread = replace(one, host=replace(one.host, live=(*one.host.live[:2], replace(one.host.live[2], type=odd))))
    for blind in (unread, replace(one, host=replace(one.host, unread=(odd,)))):
        plan = plan_vgpus(blind, {A10_4Q: 6})
        assert (plan.steps, codes(plan)) == ((), [ReasonCode.UNREAD])


def test_vfs_that_split_a_gpu_evenly_change_together() -> None:
    """AMD's and Intel's VFs split a GPU evenly: the whole set is reported as one vGPU."""
    sets = {VgpuType(f"{number} VFs"): 1 for number in (2, 4, 8)}
    one = GpuState(VgpuHost(GPU, Framework.SRIOV_VF, {GPU: sets}))
    one = replace(one, host=replace(one.host, live=(LiveVgpu(VgpuId(GPU), VgpuType("4 VFs"), GPU, None),)))
    plan = plan_vgpus(one, {VgpuType("8 VFs"): 1})
    assert [step.text.split(": ")[1].split()[0] for step in plan.steps] == ["remove", "create"]
    assert plan_vgpus(used(one, VgpuId(GPU)), {VgpuType("8 VFs"): 1}).steps == ()


@pytest.mark.parametrize(
    ("manager", "expected"),
    [
        (True, []),
        (False, [ReasonCode.NO_VGPU_HOST]),
        (Unread(HostPath("/sys/module/nvidia_vgpu_vfio"), errno=5), [ReasonCode.UNREAD]),
    ],
)
def test_vfs_are_switched_on_only_on_the_vgpu_managers_driver(
    *, manager: bool | Unread, expected: list[ReasonCode]
) -> None:
    function = PciFunction(GPU, PciId(0x10DE, 0x2236), 0x030200, driver="nvidia", sriov_total_vfs=32)
    facts = Facts(Platform(vgpu_manager=manager), {GPU: function})
    plan = plan_gpu(facts, GPU, None, DesiredVgpus({"A10-4Q": 2}))
    assert (plan.steps, codes(plan)) == ((EnableVfs(GPU),) if not expected else (), expected)


UNREAD = Unread(HostPath("/sys/module/nvidia_vgpu_vfio"), errno=5)
ON_VFIO = PciFunction(GPU, PciId(0x10DE, 0x2236), 0x030200, driver="vfio-pci", cdevs=("vfio0",), sriov_total_vfs=32)
MANAGERS = "install NVIDIA's vGPU manager in place of its usual driver"


@pytest.mark.parametrize(
    ("function", "manager", "code", "is_managers"),
    [
        (PciFunction(GPU, PciId(0x10DE, 0x1EB8), 0x030200, driver="nvidia"), False, ReasonCode.NO_VGPU_HOST, True),
        (PciFunction(GPU, PciId(0x10DE, 0x1EB8), 0x030200, driver="nvidia"), UNREAD, ReasonCode.NO_VGPU_HOST, False),
        (PciFunction(GPU, PciId(0x1002, 0x74A1), 0x120000, driver="amdgpu"), False, ReasonCode.NO_VGPU_HOST, False),
        (ON_VFIO, False, ReasonCode.NO_VGPU_HOST, False),
    ],
    ids=["a T4 on the datacenter driver", "a T4 on an unknown one", "AMD's", "on VFIO"],
)
def test_the_vgpu_manager_is_missed_where_its_gpu_is_on_nvidias_driver(
    function: PciFunction, manager: bool | Unread, code: ReasonCode, *, is_managers: bool
) -> None:
    reason = no_host(Facts(Platform(vgpu_manager=manager), {GPU: function}), GPU)
    assert (reason.code, MANAGERS in reason.text) == (code, is_managers)


@pytest.mark.parametrize(
    ("version", "manager", "is_refused"),
    [("580.159.04", False, True), ("580.159.04", True, False), ("580.159.04", UNREAD, False), (None, False, False)],
)
def test_a_gpu_stays_on_vfio_where_the_loaded_driver_makes_no_vgpus(
    version: str | None, manager: bool | Unread, *, is_refused: bool
) -> None:
    facts = Facts(Platform(nvidia_version=version, vgpu_manager=manager), {GPU: ON_VFIO})
    plan = planner.plan_vgpus(facts, GPU, None, DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus({"A10-4Q": 2})))
    assert (codes(plan), plan.follows) == ([ReasonCode.NO_VGPU_HOST] if is_refused else [], not is_refused)


def test_counts_of_several_names_of_one_type_add_up() -> None:
    """The host treats `DC-1-24QGFX` and `DC-1-24Q` as one type, and its own name and a config's name too."""
    facts = Facts(functions={GPU: PciFunction(GPU, PciId(0x10DE, 0x2236), 0x030200)})
    desired_vgpus = DesiredVgpus({"A10-4Q": 2, "NVIDIA A10-4Q": 1})
    plan = plan_gpu(facts, GPU, gpu_state(*VFS), desired_vgpus)
    assert [step.type for step in plan.steps if isinstance(step, CreateVgpu)] == [A10_4Q] * 3
    unknown = plan_gpu(facts, GPU, gpu_state(*VFS), DesiredVgpus({"A10-4Q": 1, "A10-5Q": 1}))
    assert (unknown.steps, codes(unknown)) == ((), [ReasonCode.NO_SUCH_TYPE])

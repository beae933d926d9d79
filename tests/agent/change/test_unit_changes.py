"""One plan and one change switch an isolation unit from passthrough to vGPUs and back."""

import errno
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gate import UnitBusyError
from gpuvirt.agent.change.steps.changes import Change, Changes, by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.change.state import DriverJournal
from gpuvirt.model.change.steps import DisableVfs, Override, Probe, RemoveVgpu, RollBack, Step, Unbind
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host, shared_cards
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_drivers, change_host_in, driver_state, inputs
from tests.agent.change.hostunit import A10, L40S, T4, WHOLE, HostUnit


def kinds(steps: tuple[Step, ...] | list[Step | RollBack]) -> list[type[object]]:
    """Return the kinds of the steps in their order, without repetitions."""
    found: list[type[object]] = []
    for step in steps:
        if not found or found[-1] is not type(step):
            found.append(type(step))
    return found


def test_a_passthrough_gpu_gets_vgpus_by_one_plan(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    unit.kernel.rebind(A10, "vfio-pci")
    target = DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus({"A10-4Q": 6}))
    plan = unit.plan(target)
    assert kinds(plan.steps)[-1].__name__ == "Return"
    assert plan.reasons == ()
    assert plan.later == (
        f"{A10}: switch its VFs on, if its driver makes vGPUs on VFs",
        f"{A10}: create 6 A10-4Q",
    )
    assert unit.driver == "vfio-pci", "a plan changes nothing"
    assert unit.apply(target).reasons == ()
    assert (unit.driver, unit.types) == ("nvidia", ["A10-4Q"] * 6)
    assert unit.plan(target).steps == ()


@pytest.mark.parametrize(("host", "gpu", "vgpu_type"), [("4xL40S", L40S, "L40S_8Q"), ("4xT4", T4, "T4_8Q")])
def test_a_gpu_with_vgpus_switches_to_passthrough_by_one_plan(
    host: str, gpu: PciAddress, vgpu_type: str, tmp_path: Path
) -> None:
    unit = HostUnit(host, gpu, tmp_path)
    unit.fill(**{vgpu_type: 2})
    plan = unit.plan(WHOLE)
    has_vfs = bool(unit.kernel.pci.functions[gpu].virtfns)
    expected = [RemoveVgpu, *([DisableVfs] if has_vfs else []), Override, Unbind, Probe]
    assert kinds(plan.steps) == expected
    assert plan.reasons == ()
    assert unit.apply(WHOLE).reasons == ()
    assert tuple(unit.taken) == plan.steps, "a dry run shows the steps of the change"
    assert (unit.driver, unit.types) == ("vfio-pci", [])
    assert unit.apply(WHOLE).reasons == ()
    assert unit.taken == []


def test_a_vgpu_in_use_keeps_the_driver_and_the_other_vgpus_are_removed(tmp_path: Path) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    in_use = min(vgpu for vgpu, mdev in unit.kernel.mdev.devices.items() if mdev.slot == T4)
    vm = unit.kernel.start_vm(unit.kernel.mdev.devices[in_use].group)
    assert [reason.code for reason in unit.apply(WHOLE).vgpus[T4]] == [ReasonCode.VGPU_IN_USE]
    assert (unit.driver, unit.types) == ("nvidia", ["T4-8Q"])
    assert unit.kernel.vfio.requests == []
    unit.kernel.end_vm(vm)
    assert unit.apply(WHOLE).reasons == ()
    assert unit.driver == "vfio-pci"


def test_a_process_that_uses_the_gpu_keeps_the_driver_and_no_vgpu(tmp_path: Path) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    unit.kernel.start_process("python3", "/dev/nvidia0")
    assert ReasonCode.IN_USE in {reason.code for reason in unit.apply(WHOLE).drivers}
    assert (unit.driver, unit.types) == ("nvidia", [])


@pytest.mark.parametrize("last", [False, True])
def test_no_vgpu_is_removed_while_the_group_of_one_is_unread(tmp_path: Path, *, last: bool) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    vgpus = sorted(vgpu for vgpu, mdev in unit.kernel.mdev.devices.items() if mdev.slot == T4)
    unit.kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{vgpus[last]}/iommu_group"), errno.EIO)
    assert unit.apply(WHOLE).reasons
    assert (unit.taken, unit.types) == ([], ["T4-8Q"] * 2)


def test_no_vgpu_is_removed_if_the_driver_cannot_be_loaded(tmp_path: Path) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    unit.kernel.tree.remove(HostPath("/sys/bus/pci/drivers/vfio-pci"))
    unit.change_host = change_host_in(tmp_path, unit.kernel, SimTools(unit.kernel, ()))
    outcome = unit.apply(WHOLE)
    assert ReasonCode.PREREQUISITE_MISSING in {reason.code for reason in outcome.reasons}
    assert unit.types == ["T4-8Q"] * 2
    assert unit.taken == []


def test_no_vgpu_is_removed_while_allocations_are_unknown(tmp_path: Path) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    outcome = unit.apply(WHOLE, inputs(Unknown()))
    assert {reason.code for reason in outcome.reasons} == {ReasonCode.ALLOCATIONS_UNKNOWN}
    assert unit.taken == []
    assert unit.types == ["T4-8Q"] * 2


def test_a_plan_says_why_allocations_are_unknown(tmp_path: Path) -> None:
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    why = Reason(ReasonCode.ALLOCATIONS_UNKNOWN, "the kubelet", "its checkpoint is missing")
    plan = unit.plan(WHOLE, inputs(Unknown(why)))
    assert plan.vgpus_of(T4).pending == (replace(why, subject=T4),)
    assert plan.drivers.refusals == (replace(why, subject=T4),)


def test_a_passthrough_gpu_of_a_vm_gets_no_vgpus(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    unit.kernel.rebind(A10, "vfio-pci")
    group = unit.kernel.pci.functions[A10].group
    assert isinstance(group, int)
    unit.kernel.start_vm(IommuGroup(group))
    outcome = unit.apply(DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus({"A10-4Q": 6})))
    assert {reason.code for reason in outcome.drivers} == {ReasonCode.IN_USE}
    assert (unit.driver, unit.taken, unit.kernel.vfio.requests) == ("vfio-pci", [], [])


def test_a_change_that_is_rolled_back_changes_no_other_gpu(tmp_path: Path) -> None:
    """A change no longer checks its plan during a rollback, so it may undo its own steps, and do no other."""
    gpus = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
    slots = tuple(SlotSpec(at=gpu, board="T4", group=31, numa=0) for gpu in gpus)
    kernel = build_host(HostSpec(about="two T4 in one group", slots=slots))
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    unit = driver_state(change_host).inventory.gpus[gpus[0]].unit

    def target(vgpu_type: str, number: int) -> DesiredUnit:
        return dict.fromkeys(gpus, DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus({vgpu_type: number})))

    run = Run(lambda _: None, by_hand(unit, None))
    assert apply(change_host, unit, target("T4-8Q", 2), inputs(), run).reasons == ()
    before = set(kernel.mdev.devices)
    taken: list[Step | RollBack] = []
    change = Change(Changes(lambda: ()), unit, lambda: not taken, None)  # no longer desired after the first step
    outcome = apply(change_host, unit, target("T4-16Q", 1), inputs(), Run(taken.append, change))
    assert ReasonCode.PLAN_OUTDATED in {reason.code for reason in outcome.reasons}
    assert RollBack(gpus[0]) in taken
    assert {step.parent for step in taken if isinstance(step, RemoveVgpu)} == {gpus[0]}
    assert set(kernel.mdev.devices) == before


@pytest.mark.parametrize(
    ("target", "vgpus"),
    [
        (DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus({"T4-8Q": 2})), 2),
        (DesiredGpu(DesiredDriver.PASSTHROUGH), 0),
    ],
)
def test_a_gpu_that_is_gone_keeps_no_other_gpu_of_its_unit_from_its_desired_state(
    tmp_path: Path, target: DesiredGpu, vgpus: int
) -> None:
    present, gone = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
    slots = tuple(SlotSpec(at=gpu, board="T4", group=31, numa=0) for gpu in (present, gone))
    kernel = build_host(HostSpec(about="two T4 in one group", slots=slots))
    change_host, first = change_host_in(tmp_path, kernel, SimTools(kernel)), build_inventory(scan(kernel))
    kernel.unplug(gone)
    run = Run(lambda _: None, by_hand(UnitId(present), None))
    outcome = apply(change_host, first.gpus[present].unit, dict.fromkeys((present, gone), target), inputs(), run, first)
    assert [reason.code for reason in outcome.reasons] == [ReasonCode.NO_VGPU_HOST]
    assert outcome.vgpus[gone] == outcome.reasons
    assert len(kernel.mdev.devices) == vgpus
    assert kernel.pci.functions[present].driver == ("nvidia" if vgpus else "vfio-pci")


def test_an_nvswitch_gets_its_desired_driver(tmp_path: Path) -> None:
    kernel = build_host(load_host("8xA100"))
    functions = scan(kernel).functions
    switch = next(address for address, each in functions.items() if each.kind is FunctionKind.NVSWITCH)
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    for desired, driver in ((DesiredDriver.PASSTHROUGH, "vfio-pci"), (DesiredDriver.NATIVE, "nvidia-nvswitch")):
        assert change_drivers(change_host, UnitId(switch), {switch: desired}) == ()
        assert kernel.pci.functions[switch].driver == driver


OF_A_POD = Allocation(ResourceName("nvidia.com/gpu"), DeviceId("MIG-4fd9f0a2"), "pod default/cuda")
"""An allocation whose id no driver maps to a GPU: each of NVIDIA's GPUs may be the allocated one."""


@pytest.mark.parametrize("asked", range(1, 4))
def test_no_step_is_taken_once_a_pod_has_a_gpu_by_an_unmapped_id(tmp_path: Path, asked: int) -> None:
    """The pod is admitted after the accounts were asked `asked` times: for the plan, the claim, the override."""
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    answers = iter([PodAllocations()] * asked)

    def ask(_: Inventory) -> PodAllocations:
        return next(answers, PodAllocations(unmapped=(OF_A_POD,)))

    (reason,) = change_drivers(unit.change_host, unit.id, {A10: DesiredDriver.PASSTHROUGH}, inputs(ask=ask))
    assert reason.code is ReasonCode.ALLOCATION_UNMAPPED
    assert unit.driver == "nvidia"
    assert not any(path.endswith("/unbind") for path, _ in unit.kernel.writes)


def test_an_unmapped_id_that_the_plan_knew_stops_no_step(tmp_path: Path) -> None:
    """A GPU without a native driver is of no use to that pod, so the plan does not refuse it."""
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    unit.kernel.rebind(A10, None)
    known = inputs(ask=lambda _: PodAllocations(unmapped=(OF_A_POD,)))
    assert change_drivers(unit.change_host, unit.id, {A10: DesiredDriver.PASSTHROUGH}, known) == ()
    assert unit.driver == "vfio-pci"


def test_an_unmapped_id_that_the_plan_knew_keeps_no_override_of_a_killed_change(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    unit.kernel.pci.functions[A10].override = "vfio-pci"
    boot_id = driver_state(unit.change_host).journal.boot_id
    journal = DriverJournal(overrides={A10: "vfio-pci"}, boot_id=boot_id)
    hostfiles.journal(unit.change_host.original_drivers).update(lambda _: journal)
    known = inputs(ask=lambda _: PodAllocations(unmapped=(OF_A_POD,)))
    assert change_drivers(unit.change_host, unit.id, {A10: DesiredDriver.NATIVE}, known) == ()
    assert unit.kernel.pci.functions[A10].override is None


def test_a_gpu_that_moves_to_another_unit_is_not_changed(tmp_path: Path) -> None:
    """The gates of the other members of its new unit are not locked: another process may change or allocate these."""
    gpus = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
    slots = tuple(SlotSpec(at=gpu, board="T4", group=group, numa=0) for gpu, group in zip(gpus, (31, 32), strict=True))
    kernel = build_host(HostSpec(about="two T4", slots=slots))
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    first, second = gpus
    before = build_inventory(scan(kernel))
    folder = kernel.pci.functions[second].folder
    kernel.tree.link(HostPath(f"{folder}/iommu_group"), HostPath("/sys/kernel/iommu_groups/31"))
    desired: DesiredUnit = {second: DesiredGpu(DesiredDriver.PASSTHROUGH)}
    run = Run(lambda _: None, by_hand(UnitId(second), None))
    with pytest.raises(UnitBusyError, match=rf"GPU {second} has moved to another isolation unit"):
        apply(change_host, UnitId(second), desired, inputs(), run, before)
    assert kernel.writes == []
    assert {kernel.pci.functions[gpu].driver for gpu in (first, second)} == {"nvidia"}


def test_the_only_gpu_of_vendor_vfio_switches_its_type_while_it_is_full(tmp_path: Path) -> None:
    """Its VFs list what fits beside its vGPUs, which is nothing, and no other GPU names the type."""
    card = msgspec.structs.replace(shared_cards()["L40S"], total_vfs=4)
    host = HostSpec(about="an L40S", boards={"L40S": card}, slots=(SlotSpec(at=L40S, board="L40S", group=12, numa=0),))
    unit = HostUnit(host, L40S, tmp_path)
    unit.fill(L40S_24Q=2)
    assert all(not types for types in scan(unit.kernel).vgpu_hosts[L40S].creatable.values())
    unit.fill(L40S_48Q=1)
    (carrier,) = unit.kernel.vfs.carriers.values()
    assert [spec.name for spec, _ in carrier.vgpu_host.live.values()] == ["NVIDIA L40S-48Q"]

"""MIG-backed vGPUs on demand: what is offered is what Allocate grants, and GPU instances are never changed."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.hardware.programs.smireport import read_report
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateInstance, DestroyInstance
from gpuvirt.model.change.vgpus import vgpuplanning
from gpuvirt.model.change.vgpus.gpustate import NAMESPACE, GpuState, gpu_state_of, is_mig, with_report
from gpuvirt.model.change.vgpus.modes import questions, refuse
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import IdleCount, OnDemandNames, OnDemandSettings, Settings
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.offers.ondemand.offer import Carried, carried_by, parent_of, room
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.vgpu import SimVgpuHost
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.simnode import SimNode, running_node
from tests.agent.ondemand.pods import Pod, Pods, counts, settled, vgpus
from tests.contract.proofs import remove
from tests.thoroughness import examples

GPU = PciAddress("0000:17:00.0")
LAYOUTS = {
    "A30": [{"1g.6gb": 4}, {"1g.6gb": 2, "2g.12gb": 1}, {"1g.6gb": 1}, {"2g.12gb": 2}, {"4g.24gb": 1}],
    "A100-SXM4-80GB": [{"1g.10gb": 7}, {"3g.40gb": 1, "1g.10gb": 3}, {"2g.20gb": 3}],
    "H100-SXM5-80GB": [{"1g.10gb": 3, "2g.20gb": 1}, {"7g.80gb": 1}, {"3g.40gb": 2}],
    "RTX-PRO-6000": [{"1g.24gb+gfx": 4}, {"1g.24gb+gfx": 2, "2g.48gb+gfx": 1}, {"2g.48gb+gfx": 2}],
}
"""GPU instances of boards with mdev and with vendor VFIO; on the last one, vGPUs share instances in time."""
KEEP_MIG_MODE = frozenset({"A30", "A100-SXM4-80GB"})
"""The boards that are in MIG mode again after a reboot; all of them have lost their GPU instances."""
HOSTS = st.sampled_from([(board, layout) for board, layouts in LAYOUTS.items() for layout in layouts])


def mig_host(board: str, layout: dict[str, int]) -> SimKernel:
    slot = SlotSpec(at=GPU, board=board, group=21, numa=0, vfs=16, mig=layout)
    return build_host(HostSpec(about="one GPU in MIG mode", slots=(slot,), iommufd=True))


def sim_host(kernel: SimKernel) -> SimVgpuHost:
    return kernel.vfs.carriers[GPU].vgpu_host


def instances(kernel: SimKernel) -> list[GpuInstance]:
    return list(sim_host(kernel).instances)


class Carrier:
    """One GPU, with what a decision about it sees."""

    def __init__(self, board: str, layout: dict[str, int]) -> None:
        self.kernel = mig_host(board, layout)
        self.tools = SimTools(self.kernel)
        self.report = read_report(self.tools, GPU, types=False, scheduler=False)
        self.number = 0
        self.facts = scan(self.kernel)

    def state(self, *, reported: bool) -> GpuState:
        # A VF names its type only while some VF lists that type, so that each scan needs the one before.
        self.facts = scan(self.kernel, self.facts)
        inventory = build_inventory(self.facts)
        state = gpu_state_of(inventory, GPU, (), NAMESPACE)
        assert state is not None
        return with_report(state, inventory.facts.functions[GPU], self.report) if reported else state

    def room(self, *, reported: bool) -> Counter[VgpuType]:
        state = self.state(reported=reported)
        carried = carried_by(state)
        assert isinstance(carried, Carried)
        return +Counter(dict(room(state, carried)))

    def create(self, vgpu_type: VgpuType) -> None:
        """Create a vGPU where Allocate would; raise OSError or VgpuUnavailableError as the driver refuses it."""
        host = self.state(reported=False).host
        parent = parent_of(host, vgpu_type)
        assert parent is not None
        self.number += 1
        is_mdev = host.framework.value == "mdev"
        vgpu = VgpuId(f"00000000-0000-4000-8000-{self.number:012d}" if is_mdev else parent)
        backend_of(host.framework).create(self.kernel, parent, vgpu_type, vgpu)

    def remove(self, index: int) -> None:
        host = self.state(reported=False).host
        if host.live:
            remove(backend_of(host.framework), self.kernel, host.live[index % len(host.live)])

    def creatable(self) -> Counter[VgpuType]:
        """The types of which the driver would create another one."""
        host = sim_host(self.kernel)
        return Counter({spec.name: 1 for spec in host.types if any(host.left(spec, slot) for slot in host.slots)})


@settings(deadline=None, max_examples=examples(60))
@given(HOSTS, st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=10))
def test_what_is_offered_is_what_the_driver_creates(
    host: tuple[str, dict[str, int]], reported: bool, history: list[tuple[bool, int]]
) -> None:
    gpu = Carrier(*host)
    before = instances(gpu.kernel)
    for creates, chosen in history:
        offered = gpu.room(reported=reported)
        assert offered.keys() == gpu.creatable().keys()  # nothing else, and nothing less
        assert reported or set(offered.values()) <= {1}
        if creates and offered:
            vgpu_type = sorted(offered)[chosen % len(offered)]
            for _ in range(1 + chosen % offered[vgpu_type]):
                gpu.create(vgpu_type)
        elif not creates:
            gpu.remove(chosen)
    assert instances(gpu.kernel) == before


@pytest.mark.parametrize(("board", "layout"), [(board, layouts[0]) for board, layouts in LAYOUTS.items()])
def test_nvidia_smi_tells_how_many_fit(board: str, layout: dict[str, int]) -> None:
    gpu, host = Carrier(board, layout), sim_host(mig_host(board, layout))
    expected = {spec.name: host.left(spec, GPU) for spec in host.types if host.left(spec, GPU)}
    assert gpu.room(reported=True) == expected
    assert gpu.room(reported=False) == dict.fromkeys(expected, 1)


def test_types_that_share_instances_count_those_of_other_types_as_taken() -> None:
    gpu = Carrier("RTX-PRO-6000", {"1g.24gb+gfx": 4})
    third, half = VgpuType("NVIDIA DC-1-8Q"), VgpuType("NVIDIA DC-1-12Q")
    gpu.create(third)
    gpu.create(third)
    assert gpu.room(reported=True)[third] == 10
    assert gpu.room(reported=True)[half] == 4  # each of the two may be on an instance of its own


def test_instances_of_later_count_one_by_one() -> None:
    gpu = Carrier("A30", {"1g.6gb": 1})
    one = VgpuType("NVIDIA A30-1-6C")
    gpu.create(one)
    assert gpu.room(reported=True) == {}
    for _ in range(2):
        profile = next(spec for spec in sim_host(gpu.kernel).profiles if spec.name == "1g.6gb")
        assert sim_host(gpu.kernel).add_instance(profile) is not None
    assert gpu.room(reported=True) == {one: 1}  # nvidia-smi has reported one instance


def test_while_a_vgpu_is_created_only_what_is_certain_is_offered() -> None:
    gpu = Carrier("A30", {"1g.6gb": 2, "2g.12gb": 1})
    one = VgpuType("NVIDIA A30-1-6C")
    for reported, expected in ((True, {one: 1, VgpuType("NVIDIA A30-2-12C"): 1}), (False, {})):
        state = gpu.state(reported=reported)
        carried = carried_by(state, [one])
        assert isinstance(carried, Carried)
        assert +Counter(dict(room(state, carried))) == expected


def test_types_of_the_other_mode_are_not_offered_where_the_driver_lists_them_too() -> None:
    """A driver may list all types of a card, with 0 for those that its GPU's mode excludes."""
    gpu = Carrier("A30", {"1g.6gb": 1})
    one, sliced = VgpuType("NVIDIA A30-1-6C"), VgpuType("NVIDIA A30-6C")
    state = gpu.state(reported=False)
    free = next(iter(state.host.creatable))

    def offered(**left: int) -> set[VgpuType]:
        host = replace(state.host, creatable={free: {one: left["mig"], sliced: left["time"]}})
        return set(room(replace(state, host=host), Carried(Counter())))

    assert offered(mig=1, time=0) == {one}
    assert offered(mig=0, time=1) == {sliced}


@pytest.mark.parametrize("sizes", [None, Sizes.MIXED])
def test_a_plan_changes_no_instance_and_no_mode(sizes: Sizes | None) -> None:
    gpu = Carrier("A30", {"1g.6gb": 2, "2g.12gb": 1})
    gpu.create(VgpuType("NVIDIA A30-1-6C"))
    gpu.create(VgpuType("NVIDIA A30-2-12C"))
    found = vgpuplanning.plan(gpu.state(reported=True), DesiredVgpus(sizes=sizes, on_demand=True))
    assert (found.refusals, found.pending) == ((), ())
    assert len(found.steps) == 2
    assert all(not isinstance(step, CreateInstance | DestroyInstance) for step in found.steps)
    assert {step.vgpu for step in found.steps if hasattr(step, "vgpu")} == found.undesired


@pytest.mark.parametrize("given", [{}, {VgpuType("NVIDIA A30-1-6C"): 1}])
def test_a_card_that_mixes_no_sizes_is_not_refused_in_mig_mode(given: dict[VgpuType, int]) -> None:
    """Sizes of time-sliced vGPUs do not concern a GPU in MIG mode."""
    state = Carrier("A30", {"1g.6gb": 2}).state(reported=True)
    report = state.smi
    assert report is not None
    modes = replace(report.modes, can_mix_sizes=False)
    in_mig_mode = replace(state, smi=replace(report, modes=modes))
    assert not list(refuse(in_mig_mode, given, DesiredVgpus(sizes=Sizes.MIXED, on_demand=not given)))
    sliced = replace(state, smi=replace(report, modes=replace(modes, mig=False)))
    assert list(refuse(sliced, {}, DesiredVgpus(sizes=Sizes.MIXED, on_demand=True)))


def test_the_number_of_instances_is_asked_for_without_delaying_a_plan() -> None:
    gpu = Carrier("A30", {"1g.6gb": 2})
    state, desired = gpu.state(reported=False), DesiredVgpus(on_demand=True)
    function = scan(gpu.kernel).functions[GPU]
    asked = questions(function, state, desired)
    assert asked is not None
    assert not asked.blocks
    sliced = build_host(HostSpec(about="time-sliced", slots=(SlotSpec(at=GPU, board="A30", group=1, numa=0, vfs=4),)))
    inventory = build_inventory(scan(sliced))
    shared = gpu_state_of(inventory, GPU, (), NAMESPACE)
    assert shared is not None
    assert questions(inventory.facts.functions[GPU], shared, desired) is None
    assert not any(map(is_mig, room(shared, Carried(Counter()))))


BY_TYPE = Settings(mode=DesiredMode.ON_DEMAND, on_demand=OnDemandSettings(names=OnDemandNames.TYPE))
ONE, TWO = "nvidia.com/NVIDIA_A30-1-6C", "nvidia.com/NVIDIA_A30-2-12C"


async def test_a_gpu_in_mig_mode_offers_a_vgpu_for_each_free_instance(tmp_path: Path) -> None:
    kernel = mig_host("A30", {"1g.6gb": 2, "2g.12gb": 1})
    before = instances(kernel)
    async with running_node(kernel, tmp_path, BY_TYPE) as node:
        await settled(node)
        assert counts(node) == {"NVIDIA_A30-1-6C": 1, "NVIDIA_A30-2-12C": 1, "NVIDIA_A30-4-24C": 0}
        pods = Pods(node)
        first = pods.start("a", ONE)
        assert counts(node) == {"NVIDIA_A30-1-6C": 2, "NVIDIA_A30-2-12C": 1, "NVIDIA_A30-4-24C": 0}
        second, other = pods.start("b", ONE), pods.start("c", TWO)
        assert (pods.free(ONE), pods.free(TWO)) == ([], [])
        await settled(node)
        assert sorted(vgpus(node)) == sorted([*first.vgpus, *second.vgpus, *other.vgpus])
        pods.end(first)
        await settled(node)
        assert sorted(vgpus(node)) == sorted([*second.vgpus, *other.vgpus])
        assert len(pods.free(ONE)) == 1
        pods.end(second)
        pods.end(other)
        await settled(node)
        assert vgpus(node) == []
        assert instances(kernel) == before


def lists(node: SimNode) -> list[tuple[str, str]]:
    return [
        (resource.name, device.id)
        for resource in node.view.resources
        if resource.on_demand is not None
        for device in resource.devices
    ]


@pytest.mark.parametrize(("board", "layout"), [(board, layouts[1]) for board, layouts in LAYOUTS.items()])
@pytest.mark.parametrize(("idle", "last"), [(IdleCount.ONE, False), (IdleCount.MAX, True)])
async def test_a_listed_id_is_granted_until_none_is_left(
    tmp_path: Path, board: str, layout: dict[str, int], idle: IdleCount, last: bool
) -> None:
    kernel = mig_host(board, layout)
    chosen = OnDemandSettings(names=OnDemandNames.TYPE, idle_count=idle)
    mode = Settings(mode=DesiredMode.ON_DEMAND, on_demand=chosen)
    async with running_node(kernel, tmp_path, mode) as node:
        await settled(node)
        pods, given = Pods(node), 0
        names = sorted({name for name, _ in lists(node)}, reverse=last)
        for name in names:
            while free := pods.free(name):
                pods.start(f"pod-{given}", name, free[-1])
                given += 1
        assert given > 1 or layout == {"7g.80gb": 1}
        host = sim_host(kernel)
        assert not any(host.left(spec, slot) for spec in host.types for slot in host.slots)


async def test_without_nvidia_smi_vgpus_are_offered_one_by_one(tmp_path: Path) -> None:
    kernel = mig_host("H100-SXM5-80GB", {"1g.10gb": 3})
    async with running_node(kernel, tmp_path, BY_TYPE, tools=SimTools(kernel, programs=())) as node:
        await settled(node)
        pods, resource = Pods(node), "nvidia.com/NVIDIA_H100XM-1-10C"
        for number in range(3):
            (spare,) = pods.free(resource)
            pods.start(f"pod-{number}", resource, spare)
        assert pods.free(resource) == []


def live(kernel: SimKernel) -> list[str]:
    return sorted(sim_host(kernel).live)


def filled(node: SimNode) -> list[Pod]:
    """Start pods until no instance is free."""
    pods = Pods(node)
    found: list[Pod] = []
    for name in sorted({name for name, _ in lists(node)}):
        while free := pods.free(name):
            found.append(pods.start(f"pod-{len(found)}", name, free[0]))
    return found


def rebooted(board: str, layout: dict[str, int]) -> SimKernel:
    """Return the host after a reboot: without vGPUs, with the instances that a program of the host has made."""
    kernel = mig_host(board, layout)
    kernel.reboot_id()
    return kernel


@pytest.mark.parametrize(("board", "layout"), [(board, layouts[1]) for board, layouts in LAYOUTS.items()])
async def test_after_a_reboot_pods_have_their_vgpus_again(tmp_path: Path, board: str, layout: dict[str, int]) -> None:
    before = mig_host(board, layout)
    async with running_node(before, tmp_path, BY_TYPE) as node:
        await settled(node)
        pods, recorded, held = filled(node), node.recorded.containers, node.held
    async with running_node(after := rebooted(board, layout), tmp_path, BY_TYPE) as node:
        node.recorded.containers, node.held = recorded, held
        await settled(node)
        assert live(after) == live(before)
        assert all(Pods(node).free(name) == [] for name, _ in lists(node))
        for pod in pods:
            Pods(node).pre_start(pod)
        assert instances(after) == instances(before)


@pytest.mark.parametrize("board", LAYOUTS)
async def test_pods_wait_for_the_instances_that_a_reboot_has_taken(tmp_path: Path, board: str) -> None:
    layout = LAYOUTS[board][1]
    async with running_node(before := mig_host(board, layout), tmp_path, BY_TYPE) as node:
        await settled(node)
        pods, recorded, held = filled(node), node.recorded.containers, node.held
    host = sim_host(after := rebooted(board, layout))
    made = instances(after)
    host.instances.clear()
    host.mig = host.mig_pending = board in KEEP_MIG_MODE
    async with running_node(after, tmp_path, BY_TYPE) as node:
        node.recorded.containers, node.held = recorded, held
        await settled(node)
        assert live(after) == []
        for pod in pods:
            assert node.offered[pod.resource][pod.devices[0]]  # or the kubelet would refuse the pod for good
            with pytest.raises(AllocationRefusedError, match="does not exist on this host any more"):
                Pods(node).pre_start(pod)
        host.mig = host.mig_pending = True
        host.instances += made  # by an admin, or by a service of the host
        await node.advance(60.0)  # instances make no uevent
        await settled(node)
        assert live(after) == live(before)
        for pod in pods:
            Pods(node).pre_start(pod)

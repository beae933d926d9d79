"""The agent corrects the node's allocatable before the kubelet's list, so that pods already bound are admitted."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.cluster.clusterside import integer_counts, patch_of
from gpuvirt.facts.ids import ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.view import Registration
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.nodewithvgpus import T4_4Q, T4_8Q, VGPU
from tests.agent.node.simnode import SimNode, running_node
from tests.agent.ondemand.pods import ON_DEMAND, Pods, one_p100, settled
from tests.sim.simulated import Simulated


class Status:
    """A node's status, with the kubelet's reports and the agent's corrections."""

    def __init__(self, node: SimNode) -> None:
        assert node.agent.node_counts is not None
        self.counts: Cell[Mapping[ResourceName, Count]] = node.agent.node_counts
        self.node = node
        self.allocatable: dict[ResourceName, int] = {}

    def report(self) -> None:
        """Have the kubelet know all resources, and write its counts to the node's status."""
        register_all(self.node)
        self.allocatable = {ResourceName(name): sum(devices.values()) for name, devices in self.node.offered.items()}
        self.node.agent.observations.observe_node_counts(dict(self.allocatable))

    def correct(self) -> None:
        """Have the agent write its corrections to the node's status."""
        if (patch := patch_of(self.counts.get(), self.allocatable)) is not None:
            self.allocatable |= integer_counts(patch.status.allocatable)
            self.node.agent.observations.observe_node_counts(dict(self.allocatable))


def register_all(node: SimNode) -> None:
    """Register all offered resources with the kubelet."""
    for name in node.offered:
        node.agent.reports.registration(ResourceName(name), Registration(registered=True))


def count_all(node: SimNode) -> None:
    """Have the kubelet count the devices of the newest lists."""
    node.counted = frozenset(
        (resource.name, device.id) for resource in node.view.resources for device in resource.devices if device.healthy
    )


def asks_again(node: SimNode) -> bool:
    """Return whether the agent asks the kubelet again soon what it counts."""
    return node.agent.observations.unsettled


def listed(node: SimNode, resource: str) -> int:
    return len(node.offered.get(resource, ()))


async def apply_vgpus(node: SimNode, name: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(name), Observed(None)))
    await node.settle()


async def until_offered(node: SimNode, status: Status, resource: str, count: int) -> None:
    for _ in range(60):
        await node.advance(1)
        count_all(node)
        await node.report_account()
        status.report()
        await node.settle()
        if listed(node, resource) == count:
            return
    raise AssertionError(node.offered)


@asynccontextmanager
async def halved(kernel: SimKernel, folder: Path) -> AsyncIterator[tuple[SimNode, Status]]:
    """Run an agent that has created eight vGPUs, each half a GPU, which the scheduler counts."""
    async with running_node(kernel, folder, VGPU, writes_node_counts=True) as node:
        status = Status(node)
        await apply_vgpus(node, "T4-8Q")
        await until_offered(node, status, T4_8Q, 8)
        yield node, status


async def test_the_list_is_shortened_after_allocatable_is_corrected(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        assert listed(node, T4_8Q) == 8, "the scheduler still counts them"
        assert node.agent.node_counts is not None
        assert node.agent.node_counts.get()[T4_8Q] == Count(0, 0)
        await node.advance(1)
        assert listed(node, T4_8Q) == 8
        status.correct()
        assert status.allocatable[T4_8Q] == 0
        await node.advance(0.4)
        assert listed(node, T4_8Q) == 8, "the kubelet is admitting pods that were bound before"
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_a_pod_that_was_bound_before_keeps_its_vgpu(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        vgpu = next(iter(node.offered[T4_8Q]))
        node.allocate(T4_8Q, [vgpu])
        node.hold(T4_8Q, vgpu)
        status.correct()
        await until_offered(node, status, T4_4Q, 12)
        assert list(node.offered[T4_8Q]) == [vgpu]


async def test_a_new_report_of_the_kubelet_is_corrected_and_waited_for_again(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        status.correct()
        await node.advance(0.4)
        status.report()
        await node.advance(0.3)
        assert status.allocatable[T4_8Q] == listed(node, T4_8Q) == 8
        status.correct()
        await node.advance(0.4)
        assert listed(node, T4_8Q) == 8
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_the_wait_for_the_correction_of_allocatable_is_bounded(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, _):
        await apply_vgpus(node, "T4-4Q")
        await node.advance(2.9)
        assert listed(node, T4_8Q) == 8
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_vgpus_are_allocatable_as_soon_as_the_kubelet_counts_them(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        status.correct()
        await node.advance(2)
        node.counted = frozenset()
        await node.report_account()
        await node.advance(5)
        assert listed(node, T4_4Q) == 16
        register_all(node)
        await node.settle()
        status.correct()
        assert status.allocatable.get(T4_4Q, 0) == 0, (
            "the kubelet does not count the new vGPUs yet, and would refuse pods"
        )
        assert asks_again(node), "the agent reads the kubelet's counts again soon"
        count_all(node)
        await node.report_account()
        assert not asks_again(node)
        status.correct()
        assert status.allocatable == {T4_4Q: 16, T4_8Q: 0} | {
            name: 0 for name in status.allocatable if name not in {T4_4Q, T4_8Q}
        }


async def test_a_resource_that_another_plugin_serves_is_not_corrected(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        node.agent.reports.registration(T4_8Q, Registration(registered=False))
        await node.settle()
        assert T4_8Q not in status.counts.get()
        await apply_vgpus(node, "T4-4Q")
        await node.settle()
        assert listed(node, T4_8Q) == 0, "no pod gets a vGPU of the agent, so the node's status needs no correction"
        status.correct()
        assert status.allocatable[T4_8Q] == 8


sizes = st.integers(0, 20)
names = st.sampled_from([T4_8Q, T4_4Q, ResourceName("nvidia.com/GA102GL_A10")])


@given(st.dictionaries(names, st.tuples(sizes, sizes)), st.dictionaries(names, sizes))
def test_a_patch_corrects_only_wrong_counts(
    ranges: dict[ResourceName, tuple[int, int]], says: dict[ResourceName, int]
) -> None:
    counts = {name: Count(least, least + more) for name, (least, more) in ranges.items()}
    allocatable: dict[str, str] = {**{str(name): str(number) for name, number in says.items()}, "cpu": "7500m"}
    patch = patch_of(counts, integer_counts(allocatable))
    changed = patch.status.allocatable if patch is not None else {}
    after = {**allocatable, **changed}
    assert patch_of(counts, integer_counts(after)) is None, "one patch is enough"
    for name, count in counts.items():
        number = int(after.get(name, "0"))
        assert count.least <= number <= count.most
        if count.least <= says.get(name, 0) <= count.most:
            assert name not in changed
    assert changed.keys() <= counts.keys()


def test_counts_are_read_as_the_api_server_writes_them() -> None:
    counts = integer_counts({"nvidia.com/vgpu": "2k", "nvidia.com/T4": "2", "cpu": "7900m", "memory": "x"})
    assert counts == {"nvidia.com/vgpu": 2000, "nvidia.com/T4": 2}


async def test_vgpus_at_rest_are_no_reason_to_ask_the_kubelet_often(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet counts vGPUs on GPUs that are on their native driver, as desired."""
    async with running_node(simulated("4xT4"), tmp_path, VGPU) as node:
        await apply_vgpus(node, "T4-8Q")
        for _ in range(3):
            await node.advance(20)
            count_all(node)
            await node.report_account()
        assert listed(node, T4_8Q) == 8
        assert node.counted
        assert not asks_again(node)


async def test_vgpus_that_only_the_kubelet_counts_have_no_user_to_stop(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, _):
        await apply_vgpus(node, "T4-4Q")
        reported: set[str] = set()
        for _ in range(30):
            await node.advance(0.5)
            progress = node.agent.reports.vgpus.get()
            reported.add(progress.reason if progress is not None else "")
        assert "StillAllocatable" in " ".join(reported), reported
        assert "VgpuInUse" not in " ".join(reported), reported


async def test_the_first_vgpu_on_demand_lowers_the_counts_of_other_types_at_once(tmp_path: Path) -> None:
    """The kubelet's own report comes ten seconds later: pods of other types would be bound and refused until then."""
    small, whole = ResourceName("tencent.com/vgpu-83"), ResourceName("tencent.com/vgpu-87")
    async with running_node(one_p100(), tmp_path, ON_DEMAND, writes_node_counts=True) as node:
        await settled(node)
        status, pods = Status(node), Pods(node)
        status.report()
        count_all(node)
        await settled(node)
        assert (status.allocatable[small], status.allocatable[whole]) == (1, 1)
        pod = pods.start("a", small)
        await node.settle()
        status.correct()
        assert (status.allocatable[small], status.allocatable[whole]) == (1, 0)
        count_all(node)
        await node.report_account()
        await node.settle()
        status.correct()
        assert (status.allocatable[small], status.allocatable[whole]) == (16, 0)
        pods.end(pod)
        await settled(node)
        count_all(node)
        await node.report_account()
        await node.settle()
        status.correct()
        assert (status.allocatable[small], status.allocatable[whole]) == (1, 1)

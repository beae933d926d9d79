"""The scheduler is told before the kubelet that something is withdrawn, so that what it has bound is admitted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cluster.agent.nodecounts import patch_of, said_of
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.offers.schedulable import Count
from gpuvirt.model.offers.view import Registration
from gpuvirt.node.published.notice import Notice
from gpuvirt.sim.kernel import SimKernel
from tests.nodewithvgpus import T4_4Q, T4_8Q, VGPU
from tests.simnode import SimNode, running_node
from tests.simulated import Simulated


class Status:
    """A node's status, with the kubelet's reports and the agent's corrections."""

    def __init__(self, node: SimNode) -> None:
        assert node.agent.notice is not None
        self.notice: Notice = node.agent.notice
        self.node = node
        self.said: dict[ResourceName, int] = {}

    def report(self) -> None:
        """Have the kubelet know all resources, and write what it counts."""
        register_all(self.node)
        self.said = {ResourceName(name): sum(devices.values()) for name, devices in self.node.offered.items()}
        self.notice.observe(dict(self.said))

    def correct(self) -> None:
        """Have the agent write what it wants otherwise."""
        if (patch := patch_of(self.notice.counts.get(), self.said)) is not None:
            self.said |= said_of(patch.status.allocatable)
            self.notice.observe(dict(self.said))


def register_all(node: SimNode) -> None:
    """Have the kubelet know what is offered."""
    for name in node.offered:
        node.agent.observe_registration(ResourceName(name), Registration(registered=True))


def count_all(node: SimNode) -> None:
    """Have the kubelet count what it was sent."""
    node.counted = frozenset(
        (one.name, device.id) for one in node.view.resources for device in one.devices if device.healthy
    )


def listed(node: SimNode, resource: str) -> int:
    return len(node.offered.get(resource, ()))


async def apply_vgpus(node: SimNode, name: str) -> None:
    node.agent.take_request(NodeRequest(Observed(name), Observed(None)))
    await node.settle()


async def until_carved(node: SimNode, status: Status, resource: str, count: int) -> None:
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
    """Run an agent that has created eight halves, which the scheduler counts."""
    async with running_node(kernel, folder, VGPU, tells_scheduler=True) as node:
        status = Status(node)
        await apply_vgpus(node, "T4-8Q")
        await until_carved(node, status, T4_8Q, 8)
        yield node, status


async def test_the_list_is_shortened_a_moment_after_the_scheduler_knows(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        assert listed(node, T4_8Q) == 8, "the scheduler still counts them"
        assert node.agent.notice is not None
        assert node.agent.notice.counts.get()[T4_8Q] == Count(0, 0)
        await node.advance(1)
        assert listed(node, T4_8Q) == 8
        status.correct()
        assert status.said[T4_8Q] == 0
        await node.advance(0.4)
        assert listed(node, T4_8Q) == 8, "pods that were bound before are being admitted"
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_a_pod_that_was_bound_before_keeps_what_it_is_given(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        mine = next(iter(node.offered[T4_8Q]))
        node.allocate(T4_8Q, [mine])
        node.hold(T4_8Q, mine)
        status.correct()
        await until_carved(node, status, T4_4Q, 12)
        assert list(node.offered[T4_8Q]) == [mine]


async def test_what_the_kubelet_reports_in_between_is_corrected_and_waited_for_again(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        await apply_vgpus(node, "T4-4Q")
        status.correct()
        await node.advance(0.4)
        status.report()
        await node.advance(0.3)
        assert status.said[T4_8Q] == listed(node, T4_8Q) == 8
        status.correct()
        await node.advance(0.4)
        assert listed(node, T4_8Q) == 8
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_a_scheduler_that_cannot_be_told_is_not_waited_for_long(simulated: Simulated, tmp_path: Path) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, _):
        await apply_vgpus(node, "T4-4Q")
        await node.advance(2.9)
        assert listed(node, T4_8Q) == 8
        await node.advance(0.2)
        assert listed(node, T4_8Q) == 0


async def test_what_the_kubelet_counts_again_is_reported_at_once(simulated: Simulated, tmp_path: Path) -> None:
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
        assert status.said.get(T4_4Q, 0) == 0, "the kubelet does not count them yet, and would refuse pods"
        assert node.agent.unsettled, "it is asked again soon"
        count_all(node)
        await node.report_account()
        assert status.notice.is_growing is False
        status.correct()
        assert status.said == {T4_4Q: 16, T4_8Q: 0} | {name: 0 for name in status.said if name not in {T4_4Q, T4_8Q}}


async def test_what_another_plugin_serves_under_the_same_name_is_left_alone(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with halved(simulated("4xT4"), tmp_path) as (node, status):
        node.agent.observe_registration(T4_8Q, Registration(registered=False))
        await node.settle()
        assert T4_8Q not in status.notice.counts.get()
        await apply_vgpus(node, "T4-4Q")
        await node.settle()
        assert listed(node, T4_8Q) == 0, "nobody is given any of ours, so nobody needs to be told"
        status.correct()
        assert status.said[T4_8Q] == 8


sizes = st.integers(0, 20)
names = st.sampled_from([T4_8Q, T4_4Q, ResourceName("nvidia.com/GA102GL_A10")])


@given(st.dictionaries(names, st.tuples(sizes, sizes)), st.dictionaries(names, sizes))
def test_a_patch_corrects_what_is_wrong_and_nothing_else(
    ranges: dict[ResourceName, tuple[int, int]], says: dict[ResourceName, int]
) -> None:
    counts = {name: Count(least, least + more) for name, (least, more) in ranges.items()}
    allocatable: dict[str, str] = {**{str(name): str(number) for name, number in says.items()}, "cpu": "7500m"}
    patch = patch_of(counts, said_of(allocatable))
    changed = patch.status.allocatable if patch is not None else {}
    after = {**allocatable, **changed}
    assert patch_of(counts, said_of(after)) is None, "once is enough"
    for name, count in counts.items():
        number = int(after.get(name, "0"))
        assert count.least <= number <= count.most
        if count.least <= says.get(name, 0) <= count.most:
            assert name not in changed
    assert changed.keys() <= counts.keys()

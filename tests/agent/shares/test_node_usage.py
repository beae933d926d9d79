"""The usage of shares: what is free is what pods leave, after any events in any order."""

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from typing_extensions import override

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import GpuId, Policy, Shares
from gpuvirt.shares.index import ClusterUsage
from tests.agent.shares.fits import Fit, fit

NODE, OTHER = NodeName("node01"), NodeName("node02")
A, B = GpuId("GPU-a"), GpuId("GPU-b")


def pod(*units: int) -> Demand:
    containers = (
        ContainerDemand(ContainerName(f"c{number}"), ContainerKind.APP, Units(unit))
        for number, unit in enumerate(units)
    )
    return Demand(tuple(containers))


def shares(**units: int) -> Shares:
    return {GpuId(f"GPU-{name}"): Units(number) for name, number in units.items()}


@pytest.fixture
def usage() -> ClusterUsage:
    """One node with two GPUs, one of them half allocated."""
    usage = ClusterUsage()
    usage.set_node(NODE, shares(a=1000, b=1000))
    usage.put(NODE, PodUid("one"), shares(a=500), Units(500))
    return usage


def test_a_node_without_units_is_never_one() -> None:
    assert fit(ClusterUsage(), pod(1), NODE) is Fit.NEVER


@pytest.mark.parametrize(
    ("units", "expected"),
    [((1000,), Fit.FITS), ((2000,), Fit.FULL), ((3000,), Fit.NEVER), ((600, 600), Fit.FULL), ((700, 400), Fit.FITS)],
)
def test_a_pod_fits_now_later_or_never(usage: ClusterUsage, units: tuple[int, ...], expected: Fit) -> None:
    assert fit(usage, pod(*units), NODE) is expected


def test_a_share_that_no_piece_holds_waits_for_an_eviction(usage: ClusterUsage) -> None:
    usage.put(NODE, PodUid("two"), shares(b=500), Units(500))
    assert fit(usage, pod(600), NODE) is Fit.FULL
    node = usage.node(NODE)
    assert node is not None
    assert node.largest == 500
    assert node.without([PodUid("two")]).free == shares(a=500, b=1000)
    assert node.free == shares(a=500, b=500), "nothing was evicted"


def test_a_pod_of_unknown_gpus_counts_on_each(usage: ClusterUsage) -> None:
    usage.put(NODE, PodUid("two"), None, Units(300))
    assert fit(usage, pod(800), NODE) is Fit.FULL
    usage.put(NODE, PodUid("two"), shares(a=300), Units(300))
    assert fit(usage, pod(800), NODE) is Fit.FITS


def test_a_gpu_whose_pods_take_more_than_it_has_is_full(usage: ClusterUsage) -> None:
    """A GPU may shrink, and an annotation may be edited."""
    usage.set_node(NODE, shares(a=400))
    node = usage.node(NODE)
    assert node is not None
    assert node.free == shares(a=0)
    usage.drop(NODE, PodUid("one"))
    assert usage.nodes[NODE].free == shares(a=400)
    assert node.free == shares(a=0), "what was read before stays"


def test_pods_are_counted_that_are_known_before_their_node() -> None:
    usage = ClusterUsage()
    usage.put(NODE, PodUid("one"), shares(a=500), Units(500))
    usage.set_node(NODE, shares(a=1000))
    assert fit(usage, pod(600), NODE) is Fit.FULL


def test_the_policy_places(usage: ClusterUsage) -> None:
    packed, spread = (usage.nodes[NODE].place(pod(300), policy) for policy in (Policy.BINPACK, Policy.SPREAD))
    assert packed is not None
    assert spread is not None
    assert (packed.used, spread.used) == (shares(a=300), shares(b=300))


PODS = st.sampled_from([PodUid(f"pod-{number}") for number in range(4)])
NODES = st.sampled_from([NODE, OTHER])
SHARES = st.dictionaries(st.sampled_from([A, B]), st.integers(1, 1200).map(Units), max_size=2)


class Events(RuleBasedStateMachine):
    """Nodes and pods come, change and go; the usage is compared with a count from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = ClusterUsage()
        self.capacity: dict[NodeName, Shares] = {}
        self.pods: dict[NodeName, dict[PodUid, tuple[Shares | None, Units]]] = {NODE: {}, OTHER: {}}

    @override
    def teardown(self) -> None:
        del self.usage

    @rule(name=NODES, capacity=SHARES)
    def node_changes(self, name: NodeName, capacity: Shares) -> None:
        self.capacity[name] = capacity
        self.usage.set_node(name, capacity)

    @rule(name=NODES)
    def node_goes(self, name: NodeName) -> None:
        self.capacity.pop(name, None)
        self.pods[name] = {}
        self.usage.drop_node(name)

    @rule(name=NODES, pod=PODS, used=st.none() | SHARES, total=st.integers(1, 500).map(Units))
    def pod_changes(self, name: NodeName, pod: PodUid, used: Shares | None, total: Units) -> None:
        self.pods[name][pod] = (used, total)
        self.usage.put(name, pod, used, total)

    @rule(name=NODES, pod=PODS)
    def pod_ends(self, name: NodeName, pod: PodUid) -> None:
        self.pods[name].pop(pod, None)
        self.usage.drop(name, pod)

    def counted(self, name: NodeName) -> Mapping[GpuId, int]:
        unassigned = sum(total for used, total in self.pods[name].values() if used is None)
        known = [used for used, _ in self.pods[name].values() if used is not None]
        return {
            gpu: max(units - unassigned - sum(used.get(gpu, 0) for used in known), 0)
            for gpu, units in self.capacity.get(name, {}).items()
        }

    @invariant()
    def free_is_what_pods_leave(self) -> None:
        for name in (NODE, OTHER):
            usage = self.usage.node(name) or NodeUsage()
            assert usage.free == self.counted(name)
            assert usage.largest == max(usage.free.values(), default=0)


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

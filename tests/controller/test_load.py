"""What a leading controller asks of the API server, and how often it writes."""

from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.cluster.resources import pods
from gpuvirt.sim.clock import SimClock
from tests.certificates import Authority, Pair
from tests.controller.scene import ALL_ON, SETTINGS
from tests.controller.servedcluster import OF_KUBEVIRT, OPTIONAL, ServedCluster, leading, serving
from tests.kubeletnode import CLOCK

PODS = pods(SETTINGS.namespace)


def with_policy(cluster: ServedCluster) -> None:
    cluster.put(CLUSTER_POLICIES, {"metadata": {"name": "cluster-policy", "generation": 1}, "spec": ALL_ON})


async def advance(clock: SimClock, seconds: float) -> None:
    """Advance the simulated time; between its steps the answers of the server arrive."""
    for _ in range(int(seconds)):
        await clock.advance(1.0)
        await CLOCK.sleep(0.02)


async def test_absent_kinds_are_listed_once_and_found_when_they_appear(authority: Authority, server: Pair) -> None:
    cluster, clock = ServedCluster(), SimClock()
    with_policy(cluster)
    async with serving(cluster, authority, server) as api, leading(api, authority, clock) as controller:
        await advance(clock, 300)
        assert controller.decisions is not None
        lists = {resource.plural: cluster.count("watch", resource) for resource in OPTIONAL}
        assert lists == {resource.plural: 1 for resource in OPTIONAL}
        assert cluster.counted()["get", "/apis"] <= 15
        before = cluster.counted()["get", "/apis"]
        await advance(clock, 60)
        assert cluster.counted()["get", "/apis"] - before <= 2
        cluster.install(*OF_KUBEVIRT)
        await advance(clock, 31)
        lists = {resource.plural: cluster.count("watch", resource) for resource in OPTIONAL}
        assert lists == {resource.plural: 2 for resource in OPTIONAL}, "all appeared, and are watched now"

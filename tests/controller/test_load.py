"""What a leading controller asks of the API server, and how often it writes."""

import msgspec
from bench.clusternodes import reported_gpu_node

from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES, StoredPolicy
from gpuvirt.cluster.kinds.gpunode import GPU_NODES
from gpuvirt.cluster.resources import NODES, pods
from gpuvirt.sim.clock import SimClock
from tests.certificates import Authority, Pair
from tests.controller.scene import ALL_ON, SETTINGS, node
from tests.controller.servedcluster import OF_KUBEVIRT, OPTIONAL, ServedCluster, leading, serving
from tests.kubeletnode import CLOCK, until

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


def counted_nodes(cluster: ServedCluster) -> int | None:
    """Return the number of GPU nodes in the stored status of the policy."""
    content = msgspec.json.encode(cluster.stored(CLUSTER_POLICIES, "cluster-policy"))
    found = msgspec.json.decode(content, type=StoredPolicy)
    return found.status.nodes.total if found.status is not None and found.status.nodes is not None else None


def with_node(cluster: ServedCluster, name: str) -> None:
    cluster.put(NODES, msgspec.to_builtins(node("vm-vgpu", name)))


async def test_reports_that_change_nothing_that_is_read_lead_to_no_decision(authority: Authority, server: Pair) -> None:
    cluster, clock = ServedCluster(), SimClock()
    with_policy(cluster)
    name = "sim00001"
    with_node(cluster, name)
    cluster.put(GPU_NODES, reported_gpu_node(1))
    pod = {"name": "gpuvirt-node-x", "labels": {"app": "gpuvirt-node"}}
    cluster.put(PODS, {"metadata": pod, "spec": {"nodeName": name}, "status": {}})
    async with serving(cluster, authority, server) as api, leading(api, authority, clock) as controller:
        await advance(clock, 40)
        settled, written = controller.decisions, controller.writes_done
        assert settled is not None
        for beat in range(4):
            cluster.patch(NODES, name, {"status": {"conditions": [{"type": "Ready", "message": f"beat {beat}"}]}})
            cluster.patch(GPU_NODES, name, {"status": {"totals": {"allocated": beat}}})
            cluster.patch(PODS, "gpuvirt-node-x", {"status": {"podIP": f"10.0.0.{beat}"}})
            await advance(clock, 1)
        assert controller.decisions is settled
        assert controller.writes_done == written
        cluster.patch(GPU_NODES, name, {"status": {"gpus": []}})
        await advance(clock, 2)
        assert controller.decisions is not settled


async def test_the_next_leader_writes_the_status_that_the_last_one_had_to_delay(
    authority: Authority, server: Pair
) -> None:
    cluster = ServedCluster()
    with_policy(cluster)
    with_node(cluster, "node01")
    async with serving(cluster, authority, server) as api:
        async with leading(api, authority) as first:
            await until(lambda: counted_nodes(cluster) == 1)
            for number in range(2, 5):
                with_node(cluster, f"node{number:02}")
            await until(lambda: first.decisions is not None and len(first.decisions.nodes) == 4)
        async with leading(api, authority):
            await until(lambda: counted_nodes(cluster) == 4)

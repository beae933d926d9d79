"""The requests of a leading controller to the API server, and how often it writes."""

import asyncio
from collections.abc import Callable

import msgspec
from bench.clusternodes import reported_gpu_node

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, StoredPolicy
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.kinds.kubevirt import KUBEVIRTS
from gpuvirt.kube.reflector import ApiGroups
from gpuvirt.kube.resources import NODES, pods
from gpuvirt_sim.clock import SimClock
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.controller.observedcluster import ALL_ON, SETTINGS, node
from tests.controller.servedcluster import OF_KUBEVIRT, OPTIONAL, ServedCluster, leading, serving
from tests.web.certificates import Authority, Pair

PODS = pods(SETTINGS.namespace)


def with_policy(cluster: ServedCluster) -> None:
    cluster.put(CLUSTER_POLICIES, {"metadata": {"name": "cluster-policy", "generation": 1}, "spec": ALL_ON})


async def advance(clock: SimClock, seconds: float) -> None:
    """Advance the simulated time; between its steps the answers of the server arrive."""
    for _ in range(int(seconds)):
        await clock.advance(1.0)
        await CLOCK.sleep(0.02)


async def advance_until(clock: SimClock, condition: Callable[[], bool]) -> None:
    """Advance the simulated time until a condition holds; events may come up to 0.1 s later in real time."""
    async with asyncio.timeout(30):
        while not condition():
            await advance(clock, 1)


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
        await advance(clock, 10)
        assert controller.decisions is settled
        assert controller.writes_done == written
        cluster.patch(GPU_NODES, name, {"status": {"gpus": []}})
        await advance_until(clock, lambda: controller.decisions is not settled)


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


async def watched(cluster: ServedCluster, clock: SimClock, seconds: int) -> dict[str, int]:
    """Return how often each kind of other products was asked for within a time."""
    before = {resource: cluster.count("watch", resource) for resource in OPTIONAL}
    await advance(clock, seconds)
    return {resource.plural: cluster.count("watch", resource) - before[resource] for resource in OPTIONAL}


async def test_without_a_list_of_groups_absent_kinds_are_listed_again(authority: Authority, server: Pair) -> None:
    cluster, clock = ServedCluster(), SimClock()
    with_policy(cluster)
    cluster.has_groups = False
    async with serving(cluster, authority, server) as api, leading(api, authority, clock):
        await advance(clock, 60)
        assert min((await watched(cluster, clock, 61)).values()) >= 2, "unknown is not absent"
        cluster.install(*OF_KUBEVIRT)
        assert min((await watched(cluster, clock, 31)).values()) == 1


async def test_a_kind_that_comes_after_its_group_and_one_that_goes_are_noticed(
    authority: Authority, server: Pair
) -> None:
    cluster, clock = ServedCluster(), SimClock()
    with_policy(cluster)
    cluster.install(KUBEVIRTS)
    async with serving(cluster, authority, server) as api, leading(api, authority, clock):
        await advance(clock, 60)
        asked = await watched(cluster, clock, 61)
        assert asked["virtualmachines"] >= 2, "its group exists"
        assert asked["virtualmachinepools"] == 0, "its group does not"
        cluster.install(*OF_KUBEVIRT)
        await advance(clock, 31)
        cluster.remove_kind(KUBEVIRTS)
        await advance(clock, 2)
        cluster.install(KUBEVIRTS)
        asked = await watched(cluster, clock, 31)
        assert asked == {resource.plural: int(resource == KUBEVIRTS) for resource in OPTIONAL}, "found again"


async def test_a_core_kind_waits_for_no_group(authority: Authority, server: Pair) -> None:
    """The core kinds are in no group; a proxy may answer 404 for them for a moment."""
    cluster, clock = ServedCluster(), SimClock()
    async with serving(cluster, authority, server) as api:
        credentials = Credentials("127.0.0.1", api.port, "gpu-operator", ca=authority.certificate, token=b"x")
        async with asyncio.timeout(5):
            await ApiGroups(Client(credentials), clock).until_possible(NODES)
    assert not cluster.requests

"""Bindings that are on the way while the network is cut, on a real API server with a real kube-scheduler."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.clock import RealClock
from gpuvirt.extender.fence import Fence
from gpuvirt.extender.writes import Write
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.resources import pods
from gpuvirt.model.shares.placement import Placement
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingPod
from gpuvirt.shares.sharing import Sharing
from tests.cluster.cutoff import CutOff, cut_off_network
from tests.cluster.extenderlab import ExtenderLab, Replica, extender_lab, until
from tests.controlplane.heldback import HeldBack, held_back

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

log = logging.getLogger(__name__)

PORTS = 18891, 18892
WARM = 8
"""Pods with units that are there before."""
WITHIN_S = 40.0
"""How soon all pods are bound after the network is back; kube-scheduler itself tries again after five minutes."""


@pytest.fixture
def extenders(lab: PlayedCluster, tmp_path: Path) -> Iterator[ExtenderLab]:
    with extender_lab(lab, tmp_path) as found:
        yield found


@pytest.fixture
def network(lab: PlayedCluster) -> Iterator[CutOff]:
    with cut_off_network(lab.place) as found:
        yield found


@pytest.fixture
def way(lab: PlayedCluster) -> Iterator[HeldBack]:
    with held_back(lab) as found:
        yield found


def warm(extenders: ExtenderLab) -> None:
    """Have pods bound, so that the leader has connections to the API server; each GPU keeps room for 600 units."""
    extenders.deploy("warm", WARM, 50)
    until(lambda: extenders.bound("warm") == WARM, extenders.logs)


def cut_while_it_binds(extenders: ExtenderLab, leader: Replica, cut: Callable[[], None], pods: int) -> None:
    """Create pods, and cut the network when the leader knows them; its bindings are then on the way."""
    with extenders.paused_scheduler():
        extenders.deploy("app", pods, 600)
        until(lambda: len(extenders.pods()) == pods + WARM, extenders.logs)
        for pod in extenders.pods():
            until(lambda: bool(pod.spec.node_name) or leader.knows(pod), extenders.logs)  # noqa: B023
        cut()
    until(lambda: leader.metric("gpuvirt_extender_bindings") >= 1, extenders.logs, within_s=20)


def test_packets_that_arrive_after_a_partition_overcommit_nothing(extenders: ExtenderLab, network: CutOff) -> None:
    """The leader is cut off while it binds; its successor fills all GPUs, and then the network is mended."""
    extenders.make_nodes(8)
    leader = extenders.start_replica(PORTS[0], network=network)
    assert extenders.leader() is leader
    warm(extenders)
    other = extenders.start_replica(PORTS[1])
    until(lambda: other.is_ready, extenders.logs)
    cut_while_it_binds(extenders, leader, network.cut, 60)
    lost = set(network.unsent())

    def leads() -> bool:
        lost.update(network.unsent())
        return extenders.leads_to(other)

    until(leads, extenders.logs, within_s=40)
    assert lost
    until(lambda: extenders.bound("app") == 16, extenders.logs)
    network.mend()
    until(lambda: not lost & network.connections() and leader.is_ready, extenders.logs)
    extenders.assert_not_overcommitted()
    assert extenders.bound("app") == 16


def test_bindings_that_a_proxy_delivers_later_overcommit_nothing(extenders: ExtenderLab, way: HeldBack) -> None:
    """No reset of the leader reaches the API server: what a proxy has taken, it delivers."""
    extenders.make_nodes(8)
    leader = extenders.start_replica(PORTS[0], kubeconfig=way.kubeconfig(extenders.folder))
    assert extenders.leader() is leader
    warm(extenders)
    other = extenders.start_replica(PORTS[1])
    until(lambda: other.is_ready, extenders.logs)
    cut_while_it_binds(extenders, leader, way.hold, 60)
    until(lambda: extenders.leads_to(other), extenders.logs, within_s=40)
    until(lambda: extenders.bound("app") == 16, extenders.logs)
    before = way.refused
    way.deliver()
    until(lambda: way.is_delivered, extenders.logs)
    log.info("%d late bindings were refused", way.refused - before)
    assert way.refused > before
    extenders.assert_not_overcommitted()
    assert extenders.bound("app") == 16


@pytest.mark.parametrize("seconds", [3.0, 7.0])
def test_lost_bindings_are_made_soon_after_the_network_is_back(
    extenders: ExtenderLab, network: CutOff, seconds: float
) -> None:
    """The only leader loses its packets for shorter and for longer than its lease lasts; the GPUs are filled then."""
    extenders.make_nodes(8)
    leader = extenders.start_replica(PORTS[0], network=network)
    extenders.leader()
    warm(extenders)
    cut_while_it_binds(extenders, leader, network.cut, 16)
    cut_s = RealClock().monotonic_s()
    until(lambda: RealClock().monotonic_s() - cut_s >= seconds, extenders.logs)
    network.mend()
    took_s = until(lambda: extenders.bound("app") == 16, extenders.logs, within_s=60)
    log.info("all bound %.1f s after a cut of %g s", took_s, seconds)
    extenders.assert_not_overcommitted()
    assert took_s < WITHIN_S


async def test_the_api_server_refuses_a_binding_of_an_older_version(extenders: ExtenderLab) -> None:
    """kube-scheduler is paused, since it writes in the pod's status that it can't be placed: a newer version."""
    extenders.make_nodes(1)
    client, clock = Client(from_kubeconfig(extenders.cluster.kubeconfig)), RealClock()
    fence = Fence(client, Index(Sharing()), clock)

    async def bind(pod: SharingPod) -> None:
        content = Write(pod, NodeName("share00"), Placement({}, {})).content
        await client.create_part(pods("default"), name, "binding", content, within_s=30.0, may_send=lambda: True)

    with extenders.paused_scheduler():
        extenders.deploy("app", 1, 300)
        until(lambda: len(extenders.pods()) == 1, extenders.logs)
        (name,) = (pod.metadata.name for pod in extenders.pods())
        read = await client.get(pods("default"), name, SharingPod)
        changed = await fence.change(read)
        assert changed is not None
        assert changed.metadata.resource_version != read.metadata.resource_version
        with pytest.raises(ConflictError, match="ResourceVersion in precondition"):
            await bind(read)
        again = await fence.change(read)
        assert again == changed, "a pod that has changed needs no change"
        await bind(changed)
        bound = await fence.change(changed)
        assert bound is not None
        assert bound.spec.node_name == "share00"

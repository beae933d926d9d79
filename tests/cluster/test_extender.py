"""The real kube-scheduler with the extender: pods fill all GPUs and none is overcommitted, whatever ends or stops."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster.cluster import Cluster

from tests.cluster.extenderlab import ExtenderLab, extender_lab, until

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

log = logging.getLogger(__name__)

PORTS = 18881, 18882


@pytest.fixture
def extenders(lab: Cluster, tmp_path: Path) -> Iterator[ExtenderLab]:
    with extender_lab(lab, tmp_path) as found:
        yield found


def test_a_deployment_fills_all_gpus_and_no_more(extenders: ExtenderLab) -> None:
    """20 nodes with 2 GPUs have room for 120 pods of 300 units: 3 on each GPU."""
    extenders.make_nodes(20)
    replica = extenders.start_replica(PORTS[0])
    extenders.leader()
    extenders.deploy("app", 0, 300)
    extenders.kubectl("scale", "deployment", "app", "--replicas=130")
    took_s = until(lambda: extenders.bound() == 120, extenders.logs)
    log.info("120 pods in %.1f s", took_s)
    extenders.assert_not_overcommitted()
    assert replica.metric('gpuvirt_extender_units{state="free"}') == 20 * 2 * 100
    refused = replica.metric('gpuvirt_extender_requests_total{verb="bind",result="refused"}')
    log.info("%g bindings refused", refused)

    extenders.kubectl("delete", "node", "share00")
    pods = [pod.metadata.name for pod in extenders.pods() if pod.spec.node_name == "share00"]
    extenders.kubectl("delete", "pods", "--force", *pods)
    until(lambda: len(extenders.pods()) == 130 and extenders.bound() == 114, extenders.logs)
    extenders.assert_not_overcommitted()
    extenders.make_nodes(1)
    until(lambda: extenders.bound() == 120, extenders.logs)
    extenders.assert_not_overcommitted()
    extenders.kubectl("scale", "deployment", "app", "--replicas=0")
    until(lambda: replica.metric('gpuvirt_extender_units{state="free"}') == 20 * 2000, extenders.logs)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_another_replica_takes_over(extenders: ExtenderLab, end: signal.Signals) -> None:
    """400 units: two on each GPU, although kube-scheduler counts room for five on each node."""
    extenders.make_nodes(10)
    for port in PORTS:
        extenders.start_replica(port)
    leader = extenders.leader()
    extenders.deploy("app", 60, 400)
    until(lambda: extenders.bound() >= 10, extenders.logs)
    os.kill(leader.process.pid, end)
    (other,) = (one for one in extenders.replicas if one is not leader)
    took_s = until(lambda: other.is_ready, extenders.logs)
    log.info("%s: another replica was ready after %.1f s", end.name, took_s)
    assert took_s < 15
    if end is signal.SIGSTOP:
        os.kill(leader.process.pid, signal.SIGCONT)
    until(lambda: extenders.bound() == 40, extenders.logs)
    extenders.assert_not_overcommitted()
    if end is signal.SIGSTOP:
        assert not leader.is_ready


def test_preemption_frees_one_gpu(extenders: ExtenderLab) -> None:
    """The node is full with pods of 500 units on two GPUs; a pod of 1000 units needs both pods of one GPU away."""
    extenders.make_nodes(1)
    extenders.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000}
    )
    extenders.start_replica(PORTS[0])
    extenders.leader()
    extenders.deploy("low", 4, 500)
    until(lambda: extenders.bound("low") == 4, extenders.logs)
    extenders.deploy("high", 1, 1000, priority="high")
    until(lambda: extenders.bound("high") == 1, extenders.logs)
    extenders.assert_not_overcommitted()
    assert extenders.bound("low") == 2

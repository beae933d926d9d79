"""The real kube-scheduler with the extender: pods fill all GPUs and none is overcommitted, whatever ends or stops."""

import json
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.extender.process import TERMS
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION
from tests.cluster.extenderlab import CLIENT, ExtenderLab, extender_lab, until
from tests.cluster.extenderservice import EXTENDER
from tests.web.certificates import Authority, Pair

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

log = logging.getLogger(__name__)

PORTS = 18881, 18882


@pytest.fixture
def extenders(lab: PlayedCluster, tmp_path: Path) -> Iterator[ExtenderLab]:
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
    (other,) = (replica for replica in extenders.replicas if replica is not leader)
    until(lambda: other.is_ready, extenders.logs)
    assert extenders.leads_to(leader)
    extenders.deploy("app", 60, 400)
    until(lambda: extenders.bound() >= 10, extenders.logs)
    held = extenders.lease_holder()
    os.kill(leader.process.pid, end)
    if end is signal.SIGTERM:
        until(lambda: leader.process.poll() is not None, extenders.logs)
        assert extenders.lease_holder() != held, "the leader gave its lease back"
    took_s = until(lambda: other.serves, extenders.logs)
    log.info("%s: another replica served after %.1f s", end.name, took_s)
    assert took_s < 4 * TERMS.duration_s
    until(lambda: extenders.leads_to(other), extenders.logs)
    if end is signal.SIGSTOP:
        os.kill(leader.process.pid, signal.SIGCONT)
    until(lambda: extenders.bound() == 40, extenders.logs)
    extenders.assert_not_overcommitted()
    if end is signal.SIGSTOP:
        assert not leader.serves
    assert extenders.leads_to(other)


def test_a_later_leader_counts_the_pods_of_a_failed_gpu_on_that_gpu_alone(extenders: ExtenderLab) -> None:
    """The node's agent keeps the GPU with 0 units. Were it left out, its pod would count on each of the other GPUs."""
    (node,) = extenders.make_nodes(1, gpus=4)
    first = extenders.start_replica(PORTS[0])
    extenders.leader()
    extenders.deploy("small", 1, 300)
    until(lambda: extenders.bound() == 1, extenders.logs)
    (failed,) = (gpu for pod in extenders.pods() for gpu in extenders.gpus_of(pod))
    left = {gpu: 0 if gpu == failed else units for gpu, units in extenders.capacity[node].items()}
    extenders.kubectl("annotate", "--overwrite", "node", node, f"{SHARED_GPUS_ANNOTATION}={json.dumps(left)}")
    first.process.kill()
    later = extenders.start_replica(PORTS[1])
    until(lambda: later.serves, extenders.logs)
    extenders.deploy("whole", 3, 1000)
    until(lambda: extenders.bound() == 4, extenders.logs)
    extenders.assert_not_overcommitted()


def test_the_leader_undoes_changes_of_its_slice(extenders: ExtenderLab) -> None:
    replica = extenders.start_replica(PORTS[0])
    extenders.leader()
    assert extenders.leads_to(replica)
    name = f"endpointslice/{EXTENDER}"
    extenders.kubectl("delete", name)
    until(lambda: extenders.leads_to(replica), extenders.logs)
    edit = '{"endpoints": [{"addresses": ["10.88.0.77"]}]}'
    extenders.kubectl("patch", name, "--type=merge", "-p", edit)
    until(lambda: extenders.leads_to(replica), extenders.logs)
    # Kubernetes deletes the slice after its owner.
    extenders.kubectl("delete", "service", EXTENDER)
    until(lambda: extenders.service.address is None, extenders.logs)
    extenders.make_service()
    until(lambda: extenders.leads_to(replica), extenders.logs)
    replica.process.terminate()
    until(lambda: extenders.service.address is None, extenders.logs)


def test_kube_scheduler_checks_the_extenders_certificate(lab: PlayedCluster, tmp_path: Path) -> None:
    with extender_lab(lab, tmp_path, Authority(tmp_path)) as found:
        found.make_nodes(1)
        found.start_replica(PORTS[0])
        found.leader()
        found.deploy("app", 4, 500)
        until(lambda: found.bound() == 4, found.logs)
        (tmp_path / "other").mkdir()
        found.certificate = Authority(tmp_path / "other").server("forged", alternatives=f"DNS:{EXTENDER}.default.svc")
        ended = found.replicas.pop().process
        ended.terminate()
        ended.wait(20)
        found.start_replica(PORTS[1])
        found.leader()
        found.kubectl("scale", "deployment", "app", "--replicas=0")
        until(lambda: not found.pods(), found.logs)
        found.kubectl("scale", "deployment", "app", "--replicas=1")
        until(lambda: "certificate signed by unknown authority" in (tmp_path / "scheduler.log").read_text(), found.logs)
        assert found.bound() == 0


FILES_KEPT_S = 1.5
"""Longer than kube-scheduler keeps the files of its certificate for new connections (client-go, transport.go: 1 s)."""


def test_kube_scheduler_shows_its_certificate_and_others_are_refused(lab: PlayedCluster, tmp_path: Path) -> None:
    """Its files are read again for new connections: as another client it is refused, with the reason in an event."""
    authority = Authority(tmp_path)
    own = Pair(tmp_path / "scheduler.crt", tmp_path / "scheduler.key")

    def show(pair: Pair) -> None:
        own.key.write_bytes(pair.key.read_bytes())
        own.certificate.write_bytes(pair.certificate.read_bytes())

    permitted, other = authority.client(CLIENT), authority.client("tenant")
    show(permitted)
    with extender_lab(lab, tmp_path, authority, own=own) as found:
        found.make_nodes(1)
        replica = found.start_replica(PORTS[0])
        found.leader()
        found.deploy("app", 3, 500)
        until(lambda: found.bound() == 3, found.logs)
        context = ssl.create_default_context(cafile=str(authority.certificate))
        context.check_hostname = False
        with (
            socket.create_connection(("127.0.0.1", PORTS[0]), timeout=10) as connection,
            context.wrap_socket(connection) as stranger,
            pytest.raises(ssl.SSLError, match="certificate required"),
        ):
            stranger.recv(1)
        assert replica.metric('gpuvirt_extender_tls_refused_total{reason="peer did not return a certificate"}') == 1

        show(other)
        time.sleep(FILES_KEPT_S)  # noqa: TID251  for a program outside
        replica.process.terminate()  # so that kube-scheduler connects again
        replica.process.wait(20)
        found.replicas.remove(replica)
        replica = found.start_replica(PORTS[1])
        found.leader()
        found.kubectl("scale", "deployment", "app", "--replicas=4")
        why = "the client has a certificate for tenant; the extender expects one for kube-scheduler"
        until(lambda: why in found.kubectl("get", "events", "-o", "jsonpath={.items[*].message}"), found.logs)
        assert found.bound() == 3
        show(permitted)
        took_s = until(lambda: found.bound() == 4, found.logs)
        log.info("bound %.1f s after kube-scheduler had its certificate again", took_s)


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

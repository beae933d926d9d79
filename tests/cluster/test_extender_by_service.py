"""The extender's Service by the real node's proxy: it leads to the replica that leads."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lab.cluster.cluster import Cluster

from tests.cluster.extenderlab import ExtenderLab, extender_lab, until

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

log = logging.getLogger(__name__)

PORTS = 18871, 18872


@pytest.fixture
def extenders(lab: Cluster, tmp_path: Path) -> Iterator[ExtenderLab]:
    with extender_lab(lab, tmp_path) as found:
        yield found


def test_the_nodes_proxy_leads_to_the_leader(extenders: ExtenderLab) -> None:
    """By the Service's cluster IP, as in kube-scheduler's configuration."""
    for port in PORTS:
        extenders.start_replica(port)
    leader = extenders.leader()
    (other,) = (replica for replica in extenders.replicas if replica is not leader)
    until(lambda: other.is_ready, extenders.logs)

    def serves() -> bool:
        with suppress(OSError):
            return extenders.leads_by_cluster_ip()
        return False

    until(serves, extenders.logs)
    assert all(serves() for _ in range(20)), "no connection reaches the standby"
    held = extenders.lease_holder()
    leader.process.terminate()
    until(lambda: leader.process.poll() is not None, extenders.logs)
    assert extenders.lease_holder() != held, "the leader gave its lease back"
    took_s = until(serves, extenders.logs)
    log.info("the cluster IP led to a replica that serves after %.1f s", took_s)

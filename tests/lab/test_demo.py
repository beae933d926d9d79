"""The demo's cluster is not said to run while a part of it has ended."""

import os
from pathlib import Path

import pytest
from lab.cluster import hardware
from lab.cluster.cluster import Cluster
from lab.cluster.controlplane import ClusterError
from lab.cluster.demo import demo
from lab.cluster.places import REAL


def test_the_part_of_the_demos_cluster_that_has_ended_is_named(tmp_path: Path) -> None:
    lab = Cluster(tmp_path, tmp_path, REAL)
    (tmp_path / "demo").mkdir()
    (tmp_path / "log").mkdir()
    for name in {hardware.NAME, *lab.programs} - {"kubelet"}:
        (tmp_path / f"log/{name}.pid").write_text(str(os.getpid()))
    with pytest.raises(ClusterError, match=r"^kubelet of the demo's cluster has ended; make lab-down"):
        demo(lab)

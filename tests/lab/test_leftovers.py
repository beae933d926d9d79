"""The processes that a killed run of the lab has left end with the next one, and no others."""

from pathlib import Path

import pytest
from lab.cluster.leftovers import is_leftover

FOLDER = Path("/lab/cluster")


@pytest.mark.parametrize(
    ("argv", "ends"),
    [
        (["/lab/bin/containerd-shim-runc-v2", "-address", "/lab/cluster/containerd.sock"], True),
        (["/lab/kwok-0.8.0/kwok", "--kubeconfig=/lab/cluster/kubeconfig", "--manage-single-node=w"], True),
        (["/lab/kwok-0.8.0/kwok", "--kubeconfig=/lab/other/kubeconfig"], False),
        (["/usr/bin/containerd-shim-runc-v2", "-address", "/run/containerd/containerd.sock"], False),
        ([""], False),
    ],
)
def test_processes_of_the_labs_cluster_are_told_from_others(argv: list[str], ends: bool) -> None:
    assert is_leftover(FOLDER, argv) is ends

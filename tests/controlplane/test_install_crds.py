"""`gpuvirt install crds` on a real API server without gpuvirt's kinds, as a first `helm install` runs it."""

import subprocess
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from tests.cluster.labnamespace import GPUVIRT

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

FOLDER = Path(__file__).parent.parent.parent / "deploy/chart/files/crds"
NAMES = ("clusterpolicies.nvidia.com", "gpunodes.gpuvirt.io", "vgpuschedules.gpuvirt.io")


def install(lab: PlayedCluster) -> subprocess.CompletedProcess[str]:
    command = [*GPUVIRT, "install", "crds", str(FOLDER), "--kubeconfig", str(lab.kubeconfig)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_single_run_installs_all_kinds_and_the_next_run_changes_nothing(lab: PlayedCluster) -> None:
    """The API server answers with `conditions: null` while it has not looked at a new kind."""
    first = install(lab)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines() == [f"{name}: created" for name in NAMES]
    for name in NAMES:
        assert lab.kubectl("get", name).returncode == 0, "the kind is served when the command exits"
    assert install(lab).stdout.splitlines() == [f"{name}: up to date" for name in NAMES]

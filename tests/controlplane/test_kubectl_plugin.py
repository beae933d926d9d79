"""`kubectl gpuvirt` by a real kubectl: the plugin runs, is listed, and its words are completed."""

import pytest
from lab.cluster.binaries import binaries

from gpuvirt import __version__
from tests.cli.kubectlplugin import COMMANDS, called

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]


@pytest.fixture(scope="module")
def kubectl() -> str:
    return str(binaries() / "kubectl")


def test_kubectl_runs_and_lists_the_plugin(kubectl: str) -> None:
    assert called(kubectl, "gpuvirt", "version").stdout == f"gpuvirt {__version__}\n"
    assert str(COMMANDS / "kubectl-gpuvirt") in called(kubectl, "plugin", "list").stdout.splitlines()
    refused = called(kubectl, "gpuvirt", "plan", "node/a", "--context", "x", "--workload", "vm-vgpu")
    assert refused.returncode == 2
    assert "--context" in refused.stderr


def test_kubectl_completes_the_plugin_s_words(kubectl: str) -> None:
    done = called(kubectl, "__complete", "gpuvirt", "vfio", "b")
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["bind", ":4"]

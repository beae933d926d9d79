"""An agent on the lab's node that reports in its GpuNode and follows it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import install_gpunodes

WHOLE, HALF = "nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GRID_T4-8Q"


@contextmanager
def reporting(node: LabNode, config: str = "") -> Iterator["subprocess.Popen[str]"]:
    """Run an agent in a cluster with GpuNodes; yield the agent's process."""
    install_gpunodes(node)
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("4xT4"), node.agent(config, asks) as agent, node.nodes_kept():
        yield agent


def row(node: LabNode) -> list[str]:
    """Return what `kubectl get gpunodes` prints of the node, without its age."""
    done = node.cluster.kubectl("get", "gpunodes", NODE, "--no-headers")
    return done.stdout.split()[:-1]


def set_spec(node: LabNode, spec: str) -> None:
    node.kubectl("patch", "gpunode", NODE, "--type=merge", "-p", f'{{"spec": {spec}}}')

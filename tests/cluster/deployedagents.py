"""The lab's node with agents that a controller deploys from our image."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD, ControlledNode, controlled

IMAGE = f"{PREFIX}/{NAME}"


def policy(node: LabNode, **more: object) -> Mapping[str, object]:
    """Return a policy that makes agents use the mounted host as their host."""
    plugin = {"enabled": True, "env": [{"name": "GPUVIRT_HOST_ROOT", "value": "/run/nvidia/driver"}]}
    return {"hostPaths": {"driverInstallDir": str(node.host)}, "sandboxDevicePlugin": {**plugin, **more}}


@contextmanager
def deploying(node: LabNode) -> Iterator[ControlledNode]:
    """Run a controller that deploys our image, on a host with two A10s for vGPUs."""
    options = ("--image", IMAGE, "--image-pull-policy", "Never")
    with controlled(node) as cluster, node.simulated_host("2xA10-sriov"), node.nodes_kept():
        cluster.apply_agent_access()
        with cluster.controller(*options):
            cluster.apply_policy(policy(node))
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
            yield cluster

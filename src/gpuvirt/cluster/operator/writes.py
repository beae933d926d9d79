"""What the controller writes, as data: each names the one object that it is about, and says in a line what it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.cluster.keys import Patch
from gpuvirt.cluster.kinds.clusterpolicy import Status
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.nodes.resolve import AppliedGpuNode
from gpuvirt.cluster.resources import Resource


@dataclass(frozen=True, slots=True)
class Target:
    """One object, or a part of it."""

    resource: Resource
    name: str
    part: str = ""

    @property
    def text(self) -> str:
        """How logs name it: `daemonsets gpuvirt-node`."""
        return f"{self.resource.plural} {self.name}"


@dataclass(frozen=True, slots=True)
class PatchNode:
    """Change labels and annotations of a node."""

    target: Target
    patch: Patch

    @property
    def text(self) -> str:
        """What is done: `node node01: nvidia.com/gpu.deploy.driver=true, without gpuvirt.io/node`."""
        keys = {**self.patch.metadata.labels, **self.patch.metadata.annotations}
        changes = (f"{key}={value}" if value is not None else f"without {key}" for key, value in keys.items())
        return f"node {self.target.name}: {', '.join(changes)}"


@dataclass(frozen=True, slots=True)
class ApplyGpuNode:
    """Say what is wanted of a node's GPUs."""

    target: Target
    content: AppliedGpuNode

    @property
    def text(self) -> str:
        """What is done: `GpuNode node01: mode vgpu (label nvidia.com/gpu.workload.config), ...`."""
        return f"GpuNode {self.target.name}: {', '.join(self._desired())}"

    def _desired(self) -> Iterator[str]:
        spec, origins = self.content.spec, self.content.spec.origins
        if origins is not None:
            yield f"mode {_with_origin(spec.mode, origins.mode)}"
            yield f"vGPU config {_with_origin(spec.vgpu_config, origins.vgpu_config)}"
        for one in spec.withheld:
            yield f"{one.resource} is not offered: {one.code}"


@dataclass(frozen=True, slots=True)
class PatchPolicyStatus:
    """Say how far a ClusterPolicy has come."""

    target: Target
    status: Status

    @property
    def text(self) -> str:
        """What is done: `ClusterPolicy cluster-policy is notReady: Ready is False (NodesNotReady: node ...), ...`."""
        conditions = ", ".join(f"{one.type} is {one.status} ({one.why})" for one in self.status.conditions)
        return f"ClusterPolicy {self.target.name} is {self.status.state}: {conditions}"


@dataclass(frozen=True, slots=True)
class ApplyObject:
    """Have an object of an operand."""

    target: Target
    content: Manifest

    @property
    def text(self) -> str:
        """What is done: `applied daemonsets gpuvirt-node`."""
        return f"applied {self.target.text}"


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete an object, and none that has its name by then."""

    target: Target
    uid: str
    why: str

    @property
    def text(self) -> str:
        """What is done: `deleted gpunodes node01: its node is gone`."""
        return f"deleted {self.target.text}: {self.why}"


def _with_origin(desired: str | None, origin: str) -> str:
    """Return what is wanted, and where that is from; None: somebody else says it."""
    return f"{desired} ({origin})" if desired is not None else f"as {origin}"

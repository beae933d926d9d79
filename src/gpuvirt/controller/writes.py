"""The controller's writes as data. Each names one object, and words its log line in `text`."""

from collections.abc import Iterator

import msgspec

from gpuvirt.controller.nodes.resolve import AppliedGpuNode
from gpuvirt.kube.kinds.clusterpolicy import ERROR, Status
from gpuvirt.kube.kinds.gpunode import READY
from gpuvirt.kube.kinds.workloads import Manifest
from gpuvirt.kube.labels import LabelPatch
from gpuvirt.kube.resources import Resource


class WriteTarget(msgspec.Struct, frozen=True):
    """One object, or a part of it."""

    resource: Resource
    name: str
    part: str = ""

    @property
    def text(self) -> str:
        """Its name in log lines: `daemonsets gpuvirt-node`."""
        return f"{self.resource.plural} {self.name}"


class PatchNode(msgspec.Struct, frozen=True):
    """Change labels and annotations of a node."""

    target: WriteTarget
    patch: LabelPatch

    @property
    def text(self) -> str:
        """The log line: `patched node node01: nvidia.com/gpu.deploy.driver=true, gpuvirt.io/node removed`."""
        keys = {**self.patch.metadata.labels, **self.patch.metadata.annotations}
        changes = (f"{key}={value}" if value is not None else f"{key} removed" for key, value in keys.items())
        return f"patched node {self.target.name}: {', '.join(changes)}"


class ApplyGpuNode(msgspec.Struct, frozen=True):
    """Apply the controller's part of a GpuNode's spec."""

    target: WriteTarget
    content: AppliedGpuNode

    @property
    def text(self) -> str:
        """The log line: `applied GpuNode node01: mode vgpu (label nvidia.com/gpu.workload.config), ...`."""
        return f"applied GpuNode {self.target.name}: {', '.join(self._desired())}"

    def _desired(self) -> Iterator[str]:
        spec, origins = self.content.spec, self.content.spec.origins
        if origins is not None:
            yield f"mode {_with_origin(spec.mode, origins.mode)}"
            yield f"vGPU config {_with_origin(spec.vgpu_config, origins.vgpu_config)}"
        for entry in spec.withheld:
            yield f"{entry.resource} is withheld: {entry.code}"


class PatchPolicyStatus(msgspec.Struct, frozen=True):
    """Write a ClusterPolicy's status."""

    target: WriteTarget
    status: Status

    @property
    def text(self) -> str:
        """The log line: `ClusterPolicy cluster-policy is notReady: NodesNotReady: node ...; ...`."""
        conditions = {condition.type: condition for condition in self.status.conditions}
        ready = conditions.pop(READY, None)
        others = [
            f"{kind} is {condition.status} ({condition.reason})"
            for kind, condition in conditions.items()
            if kind != ERROR  # it says what Ready says
        ]
        texts = "; ".join((*((ready.why,) if ready is not None else ()), *others))
        return f"ClusterPolicy {self.target.name} is {self.status.state}: {texts}"


class ApplyObject(msgspec.Struct, frozen=True):
    """Create or update an object of an operand."""

    target: WriteTarget
    content: Manifest

    @property
    def text(self) -> str:
        """The log line: `applied daemonsets gpuvirt-node`."""
        return f"applied {self.target.text}"


class DeleteObject(msgspec.Struct, frozen=True):
    """Delete an object by name and uid, so that a newer object of that name stays."""

    target: WriteTarget
    uid: str
    why: str

    @property
    def text(self) -> str:
        """The log line: `deleted gpunodes node01: its node no longer exists`."""
        return f"deleted {self.target.text}: {self.why}"


def _with_origin(desired: str | None, origin: str) -> str:
    """Return the desired value with its origin, or the origin alone if another writer sets the value."""
    return f"{desired} ({origin})" if desired is not None else origin

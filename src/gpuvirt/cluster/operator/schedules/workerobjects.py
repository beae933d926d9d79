"""Workers' objects as they are read: nodes with taints, their Leases, pods with owners and volumes, VolumeAttachments.

Source: Kubernetes' API reference, core/v1, storage/v1, coordination.k8s.io/v1; the annotation of mirror pods is
kubernetes.io/config.mirror (pkg/kubelet/types).
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from gpuvirt.cluster.kinds.core import ENDED, Condition
from gpuvirt.cluster.resources import Metadata, Resource
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.schedules import spec
from gpuvirt.model.schedules.observed import NodePod, WorkerNode
from gpuvirt.model.schedules.spec import PhaseName

CORDONED_BY = spec.CORDONED_BY
ANNOUNCED = "gpuvirt.io/leaves-soon"
"""The taint (PreferNoSchedule) of a node whose phase ends soon."""
STATIC_POD = "kubernetes.io/config.mirror"
LEASES = Resource("leases", "coordination.k8s.io", "v1", "kube-node-lease")
ATTACHMENTS = Resource("volumeattachments", "storage.k8s.io")
ALL_PODS = Resource("pods")


class WholeTaint(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A taint with all its fields, since taints are written as a whole list."""

    key: str
    effect: str
    value: str = ""
    time_added: str = ""


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool = False
    taints: tuple[WholeTaint, ...] = ()


class _Info(msgspec.Struct, frozen=True):
    system_uuid: str = msgspec.field(name="systemUUID", default="")


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    conditions: tuple[Condition, ...] = ()
    node_info: _Info = _Info()


class NodeObject(msgspec.Struct, frozen=True):
    """A Node."""

    metadata: Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def cordoned_by(self) -> str:
        """The schedule that has cordoned the node; empty if none has."""
        return self.metadata.labels.get(CORDONED_BY, "")

    @property
    def is_announced(self) -> bool:
        """Whether the node has the taint of workers that leave soon."""
        return any(taint.key == ANNOUNCED for taint in self.spec.taints)

    @property
    def is_ready(self) -> bool:
        """Whether the condition Ready is True."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions)

    def worker(self, types: Mapping[PhaseName, str | None], renewal: str | None, cordoned_for_s: float) -> WorkerNode:
        """Return the node as a worker. `types` has its phases, each with the vGPU type that a profile gives it."""
        return WorkerNode(
            NodeName(self.metadata.name),
            self.metadata.uid,
            self.metadata.resource_version,
            frozenset(types),
            self.spec.provider_id,
            self.status.node_info.system_uuid.lower(),
            self.spec.unschedulable,
            self.cordoned_by,
            self.is_announced,
            self.is_ready,
            renewal,
            _time(renewal),
            cordoned_for_s,
            {phase: vgpu_type for phase, vgpu_type in types.items() if vgpu_type is not None},
            self.metadata.labels,
        )


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    renew_time: str | None = None


class LeaseObject(msgspec.Struct, frozen=True):
    """The Lease of a node's kubelet."""

    metadata: Metadata
    spec: _LeaseSpec = _LeaseSpec()


class _Owner(msgspec.Struct, frozen=True):
    kind: str = ""
    controller: bool = False


class _PodMetadata(Metadata, frozen=True, rename="camel"):
    owner_references: tuple[_Owner, ...] = ()


class _EmptyDir(msgspec.Struct, frozen=True):
    """Its fields do not count."""


class _Volume(msgspec.Struct, frozen=True, rename="camel"):
    empty_dir: _EmptyDir | None = None


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    volumes: tuple[_Volume, ...] = ()


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""


class PodObject(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: _PodMetadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def node_pod(self) -> NodePod:
        """The pod as a drain sees it."""
        metadata = self.metadata
        owner = next((owner for owner in metadata.owner_references if owner.controller), None)
        return NodePod(
            PodUid(metadata.uid),
            metadata.namespace,
            metadata.name,
            bool(metadata.deletion_timestamp),
            self.status.phase in ENDED,
            owner is not None and owner.kind == "DaemonSet",
            STATIC_POD in metadata.annotations,
            owner is None,
            any(volume.empty_dir is not None for volume in self.spec.volumes),
        )


class _AttachmentSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class AttachmentObject(msgspec.Struct, frozen=True):
    """A VolumeAttachment."""

    metadata: Metadata
    spec: _AttachmentSpec = _AttachmentSpec()


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC) if text is not None else None
    except ValueError:
        return None

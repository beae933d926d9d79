"""Workers' objects as a schedule sees them: marks and phases of nodes, their Leases, pods to drain, VolumeAttachments.

Source: Kubernetes' API reference, storage/v1, coordination.k8s.io/v1.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.kinds.core import ENDED, STATIC_POD, Node, WholePod
from gpuvirt.kube.kinds.vgpuschedule import PhaseSpec
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.model.workers import spec
from gpuvirt.model.workers.observed import NodePod, WorkerNode
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt_schedules.controller.objects import time_of

PhaseTypes = Mapping[PhaseName, str | None]
"""The phases of a node, each with the vGPU type of its profile; None where no profile selects the node."""


def types_of(phases: Iterable[PhaseSpec], labels: Mapping[str, str]) -> PhaseTypes:
    """Return the phases whose workers a node is one of, by its labels."""
    return {PhaseName(phase.name): type_of(phase, labels) for phase in phases if phase.has_worker(labels)}


def type_of(phase: PhaseSpec, labels: Mapping[str, str]) -> str | None:
    """Return the vGPU type that the first profile of a phase that selects a node gives its VM."""
    return next((profile.vgpu_type for profile in phase.profiles if profile.workers.matches(labels)), None)


CORDONED_BY = spec.CORDONED_BY
ANNOUNCED = "gpuvirt.io/leaves-soon"
"""The taint (PreferNoSchedule) of a node whose phase ends soon."""
IP_TYPES = frozenset({"InternalIP", "ExternalIP"})
LEASES = Resource("leases", "coordination.k8s.io", "v1", "kube-node-lease")
ATTACHMENTS = Resource("volumeattachments", "storage.k8s.io")
ALL_PODS = Resource("pods")


def cordoned_by(node: Node) -> str:
    """Return the schedule that has cordoned a node; empty if none has."""
    return node.metadata.labels.get(CORDONED_BY, "")


def is_announced(node: Node) -> bool:
    """Return whether a node has the taint of workers that leave soon."""
    return any(taint.key == ANNOUNCED for taint in node.spec.taints)


def worker_of(
    node: Node, types: Mapping[PhaseName, str | None], renewal: str | None, cordoned_for_s: float
) -> WorkerNode:
    """Return a node as a worker. `types` has its phases, each with the vGPU type that a profile gives it."""
    return WorkerNode(
        NodeName(node.metadata.name),
        node.metadata.uid,
        node.metadata.resource_version,
        frozenset(types),
        node.spec.provider_id,
        node.status.node_info.system_uuid.lower(),
        node.spec.unschedulable,
        cordoned_by(node),
        is_announced(node),
        node.is_ready,
        renewal,
        time_of(renewal or ""),
        cordoned_for_s,
        {phase: vgpu_type for phase, vgpu_type in types.items() if vgpu_type is not None},
        node.metadata.labels,
        tuple(found.address for found in node.status.addresses if found.type in IP_TYPES),
        node.metadata.annotations.get(spec.NODE_VM, ""),
    )


def node_pod(pod: WholePod) -> NodePod:
    """Return a pod as a drain sees it."""
    metadata = pod.metadata
    return NodePod(
        PodUid(metadata.uid),
        metadata.namespace,
        metadata.name,
        bool(metadata.deletion_timestamp),
        pod.status.phase in ENDED,
        metadata.controller is not None and metadata.controller.kind == "DaemonSet",
        STATIC_POD in metadata.annotations,
        metadata.controller is None,
        any(volume.empty_dir is not None for volume in pod.spec.volumes),
    )


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    renew_time: str | None = None


class LeaseObject(msgspec.Struct, frozen=True):
    """The Lease of a node's kubelet."""

    metadata: Metadata
    spec: _LeaseSpec = _LeaseSpec()


class _AttachmentSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class AttachmentObject(msgspec.Struct, frozen=True):
    """A VolumeAttachment."""

    metadata: Metadata
    spec: _AttachmentSpec = _AttachmentSpec()

"""Why a pod does not get a vGPU of mode `on-demand`, and resources of that mode that stand for another type."""

from collections.abc import Mapping, Sequence

from gpuvirt.model.reasons import refusals, unhealthy
from gpuvirt.model.reasons.nodeproblems import ledger_not_written
from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

CHECKPOINT = "kubelet_internal_checkpoint"


def no_room(resource: str, vgpu_type: str, gpus: Mapping[str, str]) -> Reason:
    """Other vGPUs take the GPUs' room; `gpus` says of each GPU what takes it, or why it gets no vGPU."""
    message = f"has no room for another {vgpu_type} on any GPU of this node"
    seen = tuple(Seen(gpu, text) for gpu, text in sorted(gpus.items())) or (Seen("this node", "no GPU in this mode"),)
    fix = "create the pod again once a pod with a vGPU has ended; a Deployment or a Job does so by itself"
    return refusals.no_room(resource, message, fix, *seen)


def not_recorded(device: str, why: str) -> Reason:
    """The kubelet's record has to name the vGPU with which a container starts."""
    message = "can't be used by its container: the kubelet's record does not assign this vGPU to the container"
    fix = "delete the pod; a Deployment or a Job creates it again"
    return unhealthy.not_recorded(device, message, fix, Seen(CHECKPOINT, why))


def not_written(path: object, error: str) -> Reason:
    """No vGPU is created for a pod before that is on disk: it would stay when the agent is killed."""
    return ledger_not_written(path, error, "no vGPU is created for a pod")


def type_changed(resource: str, before: str, now: str, moved_to: str | None, pods: Sequence[str]) -> Reason:
    """The numbers of vGPU types may change with the driver, and the names of resources have these numbers."""
    message = f"now stands for {now}; before, it stood for {before}, {_new_name(moved_to)}"
    return Reason(ReasonCode.RESOURCE_TYPE_CHANGED, resource, message, _requested_by(pods), _fix(before, moved_to))


def resource_gone(resource: str, vgpu_type: str, moved_to: str | None, pods: Sequence[str]) -> Reason:
    """Pods of the node request a resource that it does not offer any more."""
    message = f"is no longer offered by this node; it stood for {vgpu_type}, {_new_name(moved_to)}"
    return Reason(ReasonCode.RESOURCE_GONE, resource, message, _requested_by(pods), _fix(vgpu_type, moved_to))


def _new_name(moved_to: str | None) -> str:
    return f"which is {moved_to} now" if moved_to is not None else "which no GPU of this node offers now"


def _requested_by(pods: Sequence[str]) -> tuple[Seen, ...]:
    return tuple(Seen(f"pod {pod}", "requests it") for pod in pods)


def _fix(vgpu_type: str, moved_to: str | None) -> str:
    if moved_to is not None:
        return f"request {moved_to} for {vgpu_type}, or name resources by type (on_demand.names)"
    return "request another resource of the node's annotation gpuvirt.io/vgpu-types"

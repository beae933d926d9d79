"""Why a pod does not get a vGPU of mode `on-demand`."""

from collections.abc import Mapping

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

CHECKPOINT = "kubelet_internal_checkpoint"


def no_room(resource: str, vgpu_type: str, gpus: Mapping[str, str]) -> Reason:
    """Other vGPUs take the GPUs' room; `gpus` says of each GPU what takes it, or why it gets no vGPU."""
    message = f"has no room for another {vgpu_type} on any GPU of this node"
    seen = tuple(Seen(gpu, text) for gpu, text in sorted(gpus.items())) or (Seen("this node", "no GPU in this mode"),)
    fix = "create the pod again once a pod with a vGPU has ended; a Deployment or a Job does so by itself"
    return Reason(ReasonCode.NO_ROOM, resource, message, seen, fix)


def not_recorded(device: str, why: str) -> Reason:
    """The kubelet's record has to name the vGPU with which a container starts."""
    message = "can't start its container: the kubelet's record does not say that the container has this vGPU"
    fix = "delete the pod; a Deployment or a Job creates it again"
    return Reason(ReasonCode.UNKNOWN_DEVICE, device, message, (Seen(CHECKPOINT, why),), fix)


def not_written(path: object, error: str) -> Reason:
    """No vGPU is created for a pod before that is on disk: it would stay when the agent is killed."""
    message = "can't be written, so no vGPU is created for a pod"
    fix = "free space, or mount the folder writable"
    return Reason(ReasonCode.LEDGER_NOT_WRITTEN, str(path), message, (Seen("", error),), fix)

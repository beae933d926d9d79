"""Why a container does not start with the device nodes that the kubelet has recorded for it."""

from collections.abc import Sequence

from gpuvirt.model.reasons.ondemand import CHECKPOINT
from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import allocations_unknown


def nodes_changed(device: str, target: str, recorded: Sequence[str], own: Sequence[str]) -> Reason:
    """The kernel chooses the numbers of groups and of VFIO devices, and a device gets others after a reboot."""
    message = (
        f"can't be used by its container: the device nodes in the kubelet's record are not those of {target}, and may"
        " be another pod's"
    )
    seen = (Seen(CHECKPOINT, ", ".join(recorded)), Seen(f"nodes of {target}", ", ".join(own) or "none"))
    fix = "delete the pod, so that a new one gets a device with its nodes; a Deployment or a Job creates it again"
    return Reason(ReasonCode.NODES_CHANGED, device, message, seen, fix)


def nodes_unknown(device: str, why: str) -> Reason:
    """The container may have been admitted before a reboot, and its recorded nodes may be another pod's by now."""
    message = (
        "can't be used by its container: the recorded device nodes are unknown, and the container may be from before"
        " this boot"
    )
    return allocations_unknown(device, Seen(CHECKPOINT, why), message=message)

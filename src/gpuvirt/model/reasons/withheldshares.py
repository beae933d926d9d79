"""Why pods get no units of a GPU in mode `shared`."""

from collections.abc import Sequence

from gpuvirt.model.reasons import refusals
from gpuvirt.model.reasons.nodeproblems import not_answered
from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

DEVICE_PLUGIN_LABEL = "nvidia.com/gpu.deploy.device-plugin"
OTHER_MODE = "or set mode container for it, and request nvidia.com/gpu"
LEAVE_IT = (
    f"keep the other device plugin off this node (kubectl label node NODE {DEVICE_PLUGIN_LABEL}=false; the kubelet"
    f" forgets a plugin 5 minutes after it has stopped), {OTHER_MODE}"
)


def _information(address: str) -> str:
    return f"/proc/driver/nvidia/gpus/{address}/information"


def not_nvidias(address: str, pci_id: str) -> Reason:
    """Only NVIDIA's driver lets containers share a GPU by gpuvirt's units."""
    message = f"is {pci_id}, but only NVIDIA GPUs can be in mode shared"
    return refusals.mode_unsupported(address, message, "set mode container for it")


def not_initialized(gpu: str, missing: str, found: str, folder: str | None = None) -> Reason:
    """The driver has not read the GPU's UUID or product name. `folder`: its name in /proc, if that is not `gpu`."""
    message = f"has no {missing}: NVIDIA's driver has not initialized it, or can't"
    fix = "run nvidia-smi, or nvidia-persistenced; if it still has none, see the kernel's log (dmesg | grep NVRM)"
    seen = Seen(_information(folder or gpu), found)
    return Reason(ReasonCode.GPU_NOT_INITIALIZED, gpu, message, (seen,), fix)


def type_unknown(address: str, model: str, cards: Sequence[str]) -> Reason:
    """The part of its card that a vGPU is can't be calculated."""
    which = f"stands for cards of several sizes ({', '.join(cards)})" if cards else "is not in gpuvirt's catalog"
    message = f"is a vGPU of a type that {which}, so its part of a card is unknown"
    fix = "update gpuvirt; until then request the GPU as a whole: mode container, and nvidia.com/gpu"
    return Reason(
        ReasonCode.VGPU_TYPE_UNKNOWN, address, message, (Seen(_information(address), f"Model: {model}"),), fix
    )


def enforcement_unknown(address: str) -> Reason:
    """A pod that starts too early would have no limit where an admin has set one."""
    message = "is not shared yet: the agent has not read whether shares are limits on this node, by label and GpuNode"
    seen = Seen.absent("node label gpuvirt.io/shares.enforcement, GpuNode $.spec.shares.enforcement: not observed")
    return not_answered(address, message, seen)


def less_than_a_unit(address: str, model: str, units: int) -> Reason:
    """The setting divides a card into fewer units than it has vGPUs of this type."""
    message = f"is less than one unit of a card with {units} units"
    seen = (Seen(_information(address), f"Model: {model}"),)
    return refusals.mode_unsupported(address, message, "set shares.units higher; the default is 1000", *seen)


def in_mig_mode(address: str) -> Reason:
    """Containers use GPU instances, and can't use the GPU itself."""
    message = "is in MIG mode and has GPU instances, which containers use instead of the GPU"
    fix = f"switch MIG mode off (nvidia-smi -i {address} -mig 0), {OTHER_MODE}"
    return Reason(ReasonCode.IN_MIG_MODE, address, message, (Seen("/proc/driver/nvidia/capabilities", "gi..."),), fix)


def registered_elsewhere(
    address: str, resource: str, device: str | None, *, pod: str = "", is_certain: bool = True
) -> Reason:
    """The kubelet could give the whole GPU to one pod, and units of it to others.

    `pod` has the GPU from the other device plugin. `is_certain`: the plugin's id of its device names this GPU. Without
    a device: the plugin lists none now, as one that restarts.
    """
    message = f"is offered as {resource} by another device plugin, so gpuvirt offers no units of it"
    fix = LEAVE_IT
    if pod:
        message = f"is allocated to {pod} as {resource} of another device plugin"
        fix = "no action needed: its units are offered when the pod has ended"
    elif device is None:
        message = (
            f"may be offered as {resource} again: another device plugin has registered it, and lists no device now"
        )
        fix = f"no action needed if that plugin was removed: the kubelet forgets it after 5 minutes; else {LEAVE_IT}"
    elif not is_certain:
        message = (
            f"may be a GPU that another device plugin offers as {resource}: the device's id names no GPU of this host"
        )
    seen = (Seen("the kubelet's devices", f"{resource}: {device or 'none'}"),)
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, seen, fix)

"""Why pods get no units of a GPU in mode `shared`."""

from collections.abc import Sequence

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
    return Reason(ReasonCode.MODE_UNSUPPORTED, address, message, fix="set mode container for it")


def not_initialized(address: str, missing: str, found: str) -> Reason:
    """The driver has not read the GPU's UUID or product name."""
    message = f"has no {missing}: NVIDIA's driver has not initialized it, or can't"
    fix = "run nvidia-smi, or nvidia-persistenced; if it still has none, see the kernel's log (dmesg | grep NVRM)"
    return Reason(ReasonCode.GPU_NOT_INITIALIZED, address, message, (Seen(_information(address), found),), fix)


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
    seen = (Seen.absent("node label gpuvirt.io/shares.enforcement, GpuNode $.spec.shares.enforcement: not observed"),)
    fix = "make the API server reachable from the node"
    return Reason(ReasonCode.API_SERVER_AWAY, address, message, seen, fix)


def memory_unknown(subject: str, model: str, enforcement: str) -> Reason:
    """Shares are limits on this node, and a limit is a part of the GPU's memory."""
    message = f"is {model}, whose memory size is unknown, so its shares can't be limited"
    seen = (Seen("shares.enforcement", enforcement), Seen.absent(f"shares.gpu_memory_mib.{model}"))
    fix = "set shares.gpu_memory_mib to the MiB that nvidia-smi shows for this product, or set enforcement none"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, subject, message, seen, fix)


def less_than_a_unit(address: str, model: str, units: int) -> Reason:
    """The setting divides a card into fewer units than it has vGPUs of this type."""
    message = f"is less than one unit of a card with {units} units"
    seen = (Seen(_information(address), f"Model: {model}"),)
    return Reason(ReasonCode.MODE_UNSUPPORTED, address, message, seen, "set shares.units higher; the default is 1000")


def in_mig_mode(address: str) -> Reason:
    """Containers use GPU instances, and can't use the GPU itself."""
    message = "is in MIG mode and has GPU instances, which containers use instead of the GPU"
    fix = f"switch MIG mode off (nvidia-smi -i {address} -mig 0), {OTHER_MODE}"
    return Reason(ReasonCode.IN_MIG_MODE, address, message, (Seen("/proc/driver/nvidia/capabilities", "gi..."),), fix)


def not_native_yet(address: str, driver: str | None) -> Reason:
    """The GPU still has to return to its native driver."""
    message = f"is bound to {driver or 'no driver'}, and is shared once it is bound to its native driver"
    fix = "no action needed: the agent binds it when no VM uses it; `gpuvirt vfio status` shows what it waits for"
    return Reason(ReasonCode.NO_DRIVER if driver is None else ReasonCode.WITHDRAWN, address, message, (), fix)


def carries_vgpus(address: str, count: int) -> Reason:
    """The vGPUs are removed first, and VMs may use them until then."""
    message = f"carries {count} vGPU{'' if count == 1 else 's'}, and is shared once they are removed"
    fix = "no action needed: the agent removes them when no VM uses them; `gpuvirt status` shows what it waits for"
    return Reason(ReasonCode.WITHDRAWN, address, message, (), fix)


def vfs_on(address: str, count: int) -> Reason:
    """The VFs are switched off first, and VMs may use them until then."""
    message = f"has {count} VFs, and is shared once they are off"
    fix = "no action needed: the agent switches them off when no VM uses them; `gpuvirt status` shows what it waits for"
    return Reason(ReasonCode.VFS_ENABLED, address, message, (), fix)


def registered_elsewhere(address: str, resource: str, device: str) -> Reason:
    """The kubelet could give the whole GPU to one pod, and units of it to others."""
    message = f"is offered as {resource} by another device plugin, so gpuvirt offers no units of it"
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, _devices(resource, device), LEAVE_IT)


def allocated_elsewhere(address: str, resource: str, device: str, pod: str) -> Reason:
    """A pod has the GPU from another device plugin."""
    message = f"is allocated to {pod} as {resource} of another device plugin"
    fix = "no action needed: its units are offered when the pod has ended"
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, _devices(resource, device), fix)


def maybe_registered(address: str, resource: str, device: str) -> Reason:
    """Another device plugin has a device of this vendor that can't be mapped to a GPU."""
    message = f"may be a GPU that another device plugin offers as {resource}: the device's id names no GPU of this host"
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, _devices(resource, device), LEAVE_IT)


def registered_without_devices(address: str, resource: str) -> Reason:
    """A device plugin that restarts lists its devices again."""
    message = f"may be offered as {resource} again: another device plugin has registered it, and lists no device now"
    fix = f"no action needed if that plugin was removed: the kubelet forgets it after 5 minutes; else {LEAVE_IT}"
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, _devices(resource, "none"), fix)


def _devices(resource: str, device: str) -> tuple[Seen, ...]:
    return (Seen("the kubelet's devices", f"{resource}: {device}"),)

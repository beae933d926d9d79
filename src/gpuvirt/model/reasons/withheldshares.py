"""Why pods get no units of a GPU in mode `shared`."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

DEVICE_PLUGIN_LABEL = "nvidia.com/gpu.deploy.device-plugin"
OTHER_MODE = "or set mode container for it, and request nvidia.com/gpu"
LEAVE_IT = (
    f"keep the other device plugin off this node (kubectl label node NODE {DEVICE_PLUGIN_LABEL}=false; the kubelet"
    f" forgets a plugin 5 minutes after it has stopped), {OTHER_MODE}"
)


def information(address: str) -> str:
    """Return the file in which NVIDIA's driver describes a GPU."""
    return f"/proc/driver/nvidia/gpus/{address}/information"


def not_initialized(gpu: str, missing: str, found: str, folder: str | None = None) -> Reason:
    """The driver has not read the GPU's UUID or product name. `folder`: its name in /proc, if that is not `gpu`."""
    message = f"has no {missing}: NVIDIA's driver has not initialized it, or can't"
    fix = "run nvidia-smi, or nvidia-persistenced; if it still has none, see the kernel's log (dmesg | grep NVRM)"
    seen = Seen(information(folder or gpu), found)
    return Reason(ReasonCode.GPU_NOT_INITIALIZED, gpu, message, (seen,), fix)


def in_mig_mode(address: str) -> Reason:
    """Containers use GPU instances, and can't use the GPU itself."""
    message = "is in MIG mode and has GPU instances, which containers use instead of the GPU"
    fix = f"switch MIG mode off (nvidia-smi -i {address} -mig 0), {OTHER_MODE}"
    return Reason(ReasonCode.IN_MIG_MODE, address, message, (Seen("/proc/driver/nvidia/capabilities", "gi..."),), fix)

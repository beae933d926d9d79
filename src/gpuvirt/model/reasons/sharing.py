"""Why pods get no units of a GPU in mode `shared`, or a container no share of it."""

from collections.abc import Collection, Mapping
from enum import Enum
from types import MappingProxyType

from gpuvirt.model.reasons import refusals
from gpuvirt.model.reasons.nodeproblems import not_answered
from gpuvirt.model.reasons.reason import Reason, Seen, count_of
from gpuvirt.model.reasons.reasoncodes import ReasonCode

DEVICE_PLUGIN_LABEL = "nvidia.com/gpu.deploy.device-plugin"
OTHER_MODE = "or set mode container for it, and request nvidia.com/gpu"
LEAVE_IT = (
    f"keep the other device plugin off this node (kubectl label node NODE {DEVICE_PLUGIN_LABEL}=false; the kubelet"
    f" forgets a plugin 5 minutes after it has stopped), {OTHER_MODE}"
)


def annotation_invalid(pod: str, problem: str) -> Reason:
    """A pod with a misspelt annotation would run without what its user asks for."""
    message, fix = "has an annotation of gpuvirt that means nothing", "correct it, or remove it"
    return Reason(ReasonCode.ANNOTATION_INVALID, pod, message, (Seen("$.metadata.annotations", problem),), fix)


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


RETRIES = "no action needed: the kubelet restarts the container with back-off"
RUNTIME = "the container runtime"
THE_DRIVER = "the driver"
OF_NODE = frozenset({RUNTIME, THE_DRIVER})
"""The subjects of reasons against all shared GPUs of a node."""
SCHEDULER_FIX = (
    "if the pod's schedulerName is not that of the scheduler with gpuvirt's extender, set it and create the pod again:"
    " it then waits for a GPU that has room"
)
NONE_KEPT: Mapping[str, str] = MappingProxyType({})
GENERATE = "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"


def no_room(
    subject: str, units: int, free: Mapping[str, int], kept: Mapping[str, str] = NONE_KEPT, *, placed: bool = False
) -> Reason:
    """Containers that started earlier have the units; `kept` says why pods that were deleted keep theirs.

    `placed`: whether the extender is known to have placed the pod. A scheduler without it compares a request with the
    sum of the node's units, so that a pod can end here again and again, whatever is deleted.
    """
    message = f"requests {count_of(units, 'unit')}, which no GPU of this node has left"
    seen = tuple(Seen(gpu, f"{left} free") for gpu, left in sorted(free.items())) or (Seen("this node", "no GPU"),)
    seen += tuple(Seen(pod, why) for pod, why in sorted(kept.items()))
    fix = "delete a pod that has units of a GPU, or request fewer units; `gpuvirt shares` lists pods and free units"
    if not placed:
        fix = f"{SCHEDULER_FIX}; otherwise {fix}"
    return refusals.no_room(subject, message, fix, *seen)


def driver_upgrade(label: str, sharers: Collection[str]) -> Reason:
    """NVIDIA's operator unloads the driver once nothing has it open; `sharers` are the pods with shares."""
    message = "of this node is being replaced, so that its shared GPUs give no units to more pods"
    seen = Seen("pods that hold the driver", ", ".join(sorted(sharers)) or "none with shares")
    fix = (
        "no action needed once these pods have ended: the operator's pod nvidia-driver-daemonset goes on;"
        f" if no operator runs any more: kubectl label node NODE {label.partition('=')[0]}-"
    )
    return Reason(ReasonCode.DRIVER_UPGRADE, THE_DRIVER, message, (Seen("node label", label), seen), fix)


def pod_unknown(subject: str, detail: str) -> Reason:
    """The pod's annotation has its GPU, and its requests have the containers that run at the same time."""
    message = (
        "can't start: the API server has not reported its pod to this node's agent; a container that had a GPU before"
        " starts without it"
    )
    return not_answered(subject, message, Seen("", detail))


def no_cdi_device(gpu: str, folders: Collection[str], why: str) -> Reason:
    """NVIDIA's specs have the mounts, hooks and device nodes of a GPU."""
    message = f"has no CDI device of NVIDIA ({why}), so containers can't get it"
    seen = tuple(Seen.absent(f"nvidia.com/gpu in {folder}") for folder in folders)
    return Reason(ReasonCode.CDI_SPEC_MISSING, gpu, message, seen, GENERATE)


class NoLimit(Enum):
    """Reasons why a share of a GPU can't be limited, each with its fix."""

    MEMORY = (
        "has an unknown memory size",
        "set shares.gpu_memory_mib to the MiB that nvidia-smi shows for its product, or set enforcement none",
    )
    LIBRARY = (
        "can't be used as the library that limits shares",
        "copy the library there, as a file for this node's architecture; docs/sharing.md describes how to build it",
    )
    LIST = "can't be written, so that containers would not load the library", "make the folder writable"
    DAEMON = (
        "has no MPS daemon that answers",
        "kubectl get pods -A -l app=gpuvirt-mps shows its pods; else set sandboxDevicePlugin.shares.mps.enabled",
    )
    DRIVER = (
        "can't be limited by NVIDIA's driver",
        "use driver 615 or newer on a node with cgroup v2, or set sandboxDevicePlugin.shares.otherwise",
    )
    PROGRAM = (
        "is not there, by which limits are set in NVIDIA's driver",
        "run the agent from gpuvirt's image; on a host without it, compile the program (docs/sharing.md)",
    )
    NVML = (
        "has no libnvidia-ml.so in NVIDIA's CDI spec, by which limits are set in the driver",
        f"write the spec again: {GENERATE}",
    )
    CLIENTS = (
        "is used by as many processes as MPS serves",
        "wait until a process has ended; use fewer processes for each container",
    )


def limit_not_possible(subject: object, cause: NoLimit, found: str) -> Reason:
    """A container with a part of a GPU would start without its limit, or fail."""
    message, fix = cause.value
    message = f"{message}, so no container with part of a GPU starts"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, str(subject), message, (Seen("", found),), fix)

"""Why a container does not get a share of a GPU."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

CHECKPOINT = "kubelet_internal_checkpoint"
RETRIES = "no action needed: the kubelet restarts the container with back-off"
RUNTIME = "the container runtime"
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
    message = f"requests {units} units, which no GPU of this node has left"
    seen = tuple(Seen(gpu, f"{left} free") for gpu, left in sorted(free.items())) or (Seen("this node", "no GPU"),)
    seen += tuple(Seen(pod, why) for pod, why in sorted(kept.items()))
    fix = "delete a pod that has units of a GPU, or request fewer units; `gpuvirt shares` lists pods and free units"
    if not placed:
        fix = f"{SCHEDULER_FIX}; otherwise {fix}"
    return Reason(ReasonCode.NO_ROOM, subject, message, seen, fix)


def invalid_units(subject: str, units: int, whole: int) -> Reason:
    """A share is a part of one GPU, or whole GPUs."""
    message = f"requests {units} units, which are neither part of one GPU nor whole GPUs"
    fix = f"request at most {whole} units, or a multiple of {whole}"
    return Reason(ReasonCode.NO_ROOM, subject, message, (Seen("units of a GPU", str(whole)),), fix)


def pod_unknown(subject: str, detail: str) -> Reason:
    """The pod's annotation has its GPU, and its requests have the containers that run at the same time."""
    message = "can't start: the API server has not reported its pod to this node's agent"
    fix = "make the API server reachable from the node; a container that had a GPU before starts without it"
    return Reason(ReasonCode.API_SERVER_AWAY, subject, message, (Seen("", detail),), fix)


def gpu_unknown(gpu: str) -> Reason:
    """The gate of a GPU belongs to its PCI slot, which only the driver's information names."""
    message = "can't be assigned to a container: NVIDIA's driver shows no GPU with this UUID now"
    seen = (Seen.absent("/proc/driver/nvidia/gpus/*/information"),)
    fix = "run nvidia-smi -L; if it lacks the GPU, see the kernel's log (dmesg | grep NVRM)"
    return Reason(ReasonCode.GPU_NOT_INITIALIZED, gpu, message, seen, fix)


def not_recorded(resource: str, units: int, why: str) -> Reason:
    """The kubelet's checkpoint names the container of each allocation."""
    message = f"can't be assigned: the kubelet's checkpoint names no container with these {units} units"
    return Reason(ReasonCode.UNKNOWN_DEVICE, resource, message, (Seen(CHECKPOINT, why),), RETRIES)


def units_differ(subject: str, recorded: int, requested: int) -> Reason:
    """The record belongs to another request than the pod has."""
    message = f"has {recorded} units in the kubelet's record, but requests {requested}"
    return Reason(ReasonCode.UNKNOWN_DEVICE, subject, message, (Seen(CHECKPOINT),), "create the pod again")


def runtime_unknown() -> Reason:
    """Only the API server's Node names the runtime and its version."""
    message = "is not known yet: the agent reads it from its Node, so no units are offered"
    seen = (Seen.absent("node $.status.nodeInfo.containerRuntimeVersion"),)
    fix = "make the API server reachable from the node, and set --node-name"
    return Reason(ReasonCode.API_SERVER_AWAY, RUNTIME, message, seen, fix)


def no_cdi_device(gpu: str, folders: Collection[str], why: str) -> Reason:
    """NVIDIA's specs have the mounts, hooks and device nodes of a GPU."""
    message = f"has no CDI device of NVIDIA ({why}), so containers can't get it"
    seen = tuple(Seen.absent(f"nvidia.com/gpu in {folder}") for folder in folders)
    return Reason(ReasonCode.CDI_SPEC_MISSING, gpu, message, seen, GENERATE)


def spec_not_written(path: object, error: str) -> Reason:
    """The container runtime reads the spec."""
    message = "can't be written, so its container can't start"
    return Reason(ReasonCode.CDI_NOT_WRITTEN, str(path), message, (Seen("", error),), "make the folder writable")


def limit_required(pod: str) -> Reason:
    """A pod asks for a limit where the shares of the node are none."""
    message = (
        "requires an enforced limit for its share of a GPU, but this node does not enforce shares, so the pod does not"
        " start"
    )
    fix = "kubectl label node NODE gpuvirt.io/shares.enforcement=hami-core, or mps; or remove the pod's annotation"
    seen = (Seen("gpuvirt.io/enforcement", "required"), Seen("shares.enforcement", "none"))
    return Reason(ReasonCode.LIMIT_REQUIRED, pod, message, seen, fix)


def limit_without_memory(gpu: str) -> Reason:
    """A limit is a part of the GPU's memory."""
    message = "has an unknown memory size, so no container can be limited to part of it"
    fix = "set shares.gpu_memory_mib for its product; `gpuvirt devices` names the product"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, gpu, message, (Seen.absent("shares.gpu_memory_mib"),), fix)


def limit_without_library(path: object, why: str) -> Reason:
    """The dynamic linker starts programs without a library that it can't load, so they would have no limit."""
    message = "can't be used as the library that limits shares, so no container with part of a GPU starts"
    fix = "copy the library there, as a file for this node's architecture; docs/sharing.md describes how to build it"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, str(path), message, (Seen("", why),), fix)


def limit_not_written(path: object, error: str) -> Reason:
    """The file names the library that limits shares to the dynamic linker of each container."""
    message = "can't be written, so no container with part of a GPU starts"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, str(path), message, (Seen("", error),), "make the folder writable")


def limit_without_daemon(folder: object, why: str) -> Reason:
    """A process that finds no MPS daemon runs without it, and without its limits."""
    message = "has no MPS daemon that answers, so no container with part of a GPU starts"
    fix = "kubectl get pods -l app=gpuvirt-mps on this node; docs/sharing.md describes how to run the daemon"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, str(folder), message, (Seen("", why),), fix)


def too_many_clients(gpu: str, clients: int) -> Reason:
    """The MPS daemon refuses further processes, so that the container would start and fail."""
    message = f"is used by {clients} processes through MPS, which serves no more, so the container waits"
    fix = "wait until a process has ended; use fewer processes for each container"
    return Reason(ReasonCode.LIMIT_NOT_POSSIBLE, gpu, message, (Seen("ps", f"{clients} clients"),), fix)


def records_lost(path: object, what: str) -> Reason:
    """The file with the shares of containers could not be used."""
    message = f"{what}; the shares of containers were read from their CDI specs instead"
    return Reason(ReasonCode.LEDGER_LOST, str(path), message, fix="no action needed unless the host is rebooted")


def records_not_written(path: object, error: str) -> Reason:
    """No container starts whose share is not on disk."""
    message = "can't be written, so no container with a share can start"
    fix = "free space, or mount the folder writable"
    return Reason(ReasonCode.LEDGER_NOT_WRITTEN, str(path), message, (Seen("", error),), fix)


def runtime_without_cdi(runtime: str, why: str) -> Reason:
    """A container of such a runtime would start without its GPU, or with all GPUs."""
    message = f"does not apply CDI devices ({why}), so this node offers no units of GPUs"
    fix = "set enable_cdi = true in containerd's configuration and restart containerd, or upgrade it to 2.0 or newer"
    seen = (Seen("Node $.status.nodeInfo.containerRuntimeVersion", runtime or "not known yet"),)
    return Reason(ReasonCode.PREREQUISITE_MISSING, RUNTIME, message, seen, fix)

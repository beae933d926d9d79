"""The limit of a share by HAMi-core: a container's variables and mounts, and what of a library's file is checked.

The library is preloaded into each program of a container. It counts the memory of all processes of the container in one
file, refuses what exceeds the limit, and delays kernels. Contract: Project-HAMi/HAMi-core 8f3a89c, whose
multiprocess_memory_limit.c reads these variables. A limit with an index takes precedence there over one without, and a
container with a limit has one GPU. So both are set, as a pod may set the other one itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.reasons import Reason, sharing
from gpuvirt.model.shares.demand import ContainerName, Units
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareLimit
from gpuvirt.plain import Plain

LIBRARY = "/usr/local/gpuvirt/libvgpu.so"
"""The library in the container."""
PRELOAD = "/etc/ld.so.preload"
"""By which the dynamic linker loads the library, whatever a pod has in LD_PRELOAD."""
REGION_FOLDER = "/usr/local/gpuvirt/region"
"""A file system of the container, with the file in which its processes count their memory."""
REGION_FILE = "memory"
MEMORY, COMPUTE = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"
REGION, POLICY = "CUDA_DEVICE_MEMORY_SHARED_CACHE", "GPU_CORE_UTILIZATION_POLICY"
VARIABLES = frozenset({MEMORY, f"{MEMORY}_0", COMPUTE, f"{COMPUTE}_0", REGION, POLICY})
_READ_ONLY: list[Plain] = ["ro", "nosuid", "nodev", "bind"]
_REGION_OPTIONS: list[Plain] = ["nosuid", "nodev", "noexec", "mode=1777", "size=16m"]
"""The region has 2 MB, so a container can't fill the memory of the host with it."""
HEADER = 18
"""The bytes of a file that `why_unusable` reads."""
_ELF_64_LITTLE, _SHARED_OBJECT = b"\x7fELF\x02\x01", 3


@dataclass(frozen=True, slots=True)
class LimitPaths:
    """The files of the host that a container with a limit has."""

    library: str = ""
    preload: str = ""


NO_FILES = LimitPaths()


def limit_of(units: Units, gpu_units: Units, memory_mib: int) -> ShareLimit:
    """Return the limit of a container with some of a GPU's units; 0 would mean no limit, so it is at least 1."""
    return ShareLimit(max(units * memory_mib // gpu_units, 1), max(units * 100 // gpu_units, 1))


def with_limits(pod: PodRecord, node: NodeSharing, *, requires: bool = False) -> PodRecord | Reason:
    """Return the record of a new pod with a limit for each container that has a part of a GPU, or why that can't be.

    Nobody else has a share of the GPUs of a container that has whole ones. `requires`: the pod asks for limits.
    """
    if node.enforcement is Enforcement.NONE:
        return sharing.limit_required(f"pod {pod.namespace}/{pod.name}") if requires else pod
    limited: dict[ContainerName, ContainerRecord] = {}
    for name, share in pod.containers.items():
        limited[name] = share
        if share.units >= node.whole:
            continue
        (gpu,) = share.gpus
        if gpu not in node.memory_mib:
            return sharing.limit_without_memory(gpu)
        limit = limit_of(share.units, node.capacity[gpu], node.memory_mib[gpu])
        limited[name] = msgspec.structs.replace(share, limit=limit)
    return msgspec.structs.replace(pod, containers=limited)


def variables(limit: ShareLimit) -> Mapping[str, str]:
    """Return the variables of a container with a limit."""
    memory, compute = f"{limit.memory_mib}m", str(limit.compute_percent)
    return {
        MEMORY: memory,
        f"{MEMORY}_0": memory,
        COMPUTE: compute,
        f"{COMPUTE}_0": compute,
        REGION: f"{REGION_FOLDER}/{REGION_FILE}",
        POLICY: "force",
    }


def with_mounts(edits: Fields, files: LimitPaths) -> Fields:
    """Return the edits of a container's CDI device with the mounts of its limit."""
    theirs = edits.get("mounts")
    mounts: list[Plain] = [
        {"hostPath": files.library, "containerPath": LIBRARY, "options": _READ_ONLY},
        {"hostPath": files.preload, "containerPath": PRELOAD, "options": _READ_ONLY},
        {"hostPath": "tmpfs", "containerPath": REGION_FOLDER, "type": "tmpfs", "options": _REGION_OPTIONS},
    ]
    return {**edits, "mounts": [*(theirs if isinstance(theirs, list) else ()), *mounts]}


def why_unusable(header: bytes) -> str | None:
    """Return why a file with this beginning is no library for 64-bit programs, None if it may be one.

    The dynamic linker only warns of what it can't preload, and starts the program without it.
    """
    if not header.startswith(_ELF_64_LITTLE):
        return "no 64-bit ELF file"
    if len(header) < HEADER or int.from_bytes(header[16:18], "little") != _SHARED_OBJECT:
        return "no shared object"
    return None

"""The limit of a share with HAMi-core: a container's variables and mounts, and the checks of the library's file.

The library is preloaded into each program of a container. It counts the memory of all processes of the container in one
file, refuses what exceeds the limit, and delays kernels. Contract: Project-HAMi/HAMi-core 8f3a89c, whose
multiprocess_memory_limit.c reads these variables. A limit with an index takes precedence there over one without, and a
container with a limit has one GPU. So both are set, as a pod may set the other one itself.
"""

from collections.abc import Mapping, Sequence

from gpuvirt.model.shares.node.records import ShareLimit
from gpuvirt.plain import Plain

LIBRARY = "/usr/local/gpuvirt/libvgpu.so"
"""The library in the container."""
PRELOAD = "/etc/ld.so.preload"
"""By which the dynamic linker loads the library, whatever a pod has in LD_PRELOAD."""
REGION_FOLDER = "/usr/local/gpuvirt/region"
"""A file system of the container, with the file in which its processes count their memory.

A container could fill a folder of the host, and would find the counts of ended processes there when it restarts.
"""
REGION_FILE = "memory"
MEMORY, COMPUTE = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"
NO_LIMIT = "0"
"""Of compute time, where the MPS daemon divides it."""
REGION, POLICY = "CUDA_DEVICE_MEMORY_SHARED_CACHE", "GPU_CORE_UTILIZATION_POLICY"
VARIABLES = frozenset({MEMORY, f"{MEMORY}_0", COMPUTE, f"{COMPUTE}_0", REGION, POLICY})
_READ_ONLY: list[Plain] = ["ro", "nosuid", "nodev", "bind"]
_REGION_OPTIONS: list[Plain] = ["nosuid", "nodev", "noexec", "mode=1777", "size=16m"]
"""The region has 2 MB, so a container can't fill the memory of the host with it."""
HEADER = 20
"""The bytes of a file that `why_unusable` reads."""
_ELF_64_LITTLE, _SHARED_OBJECT = b"\x7fELF\x02\x01", 3
_ARCHITECTURES = {62: "x86-64", 183: "aarch64"}
"""The names of `e_machine` (elf(5)) for messages."""


def variables(limit: ShareLimit) -> Mapping[str, str]:
    """Return the variables of a container with a limit."""
    memory = f"{limit.memory_mib}m"
    compute = NO_LIMIT if limit.by.has_daemon else str(limit.compute_percent)
    return {
        MEMORY: memory,
        f"{MEMORY}_0": memory,
        COMPUTE: compute,
        f"{COMPUTE}_0": compute,
        REGION: f"{REGION_FOLDER}/{REGION_FILE}",
        POLICY: "force",
    }


def mounts(library: str, preload: str) -> Sequence[Plain]:
    """Return the mounts of a container with a limit; the library and its list are files of the host.

    `/tmp/vgpulock`, which pods would share, is not mounted: nothing in the library takes that lock.
    """
    return [
        {"hostPath": library, "containerPath": LIBRARY, "options": _READ_ONLY},
        {"hostPath": preload, "containerPath": PRELOAD, "options": _READ_ONLY},
        {"hostPath": "tmpfs", "containerPath": REGION_FOLDER, "type": "tmpfs", "options": _REGION_OPTIONS},
    ]


def why_unusable(header: bytes, program: bytes) -> str | None:
    """Return why a file with this beginning is no library for the node's 64-bit programs, None if it may be one.

    `program` is the beginning of a program of the node.

    If the dynamic linker can't preload a library, it only warns, and starts the program without it.
    """
    if not header.startswith(_ELF_64_LITTLE):
        return "no 64-bit ELF file"
    if len(header) < HEADER or int.from_bytes(header[16:18], "little") != _SHARED_OBJECT:
        return "no shared object"
    its, ours = (int.from_bytes(content[18:20], "little") for content in (header, program))
    if its != ours:
        return f"for {_ARCHITECTURES.get(its, its)}, and the node's programs are for {_ARCHITECTURES.get(ours, ours)}"
    return None

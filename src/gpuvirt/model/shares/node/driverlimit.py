"""The limit of a share by NVIDIA's driver: the hook that sets it on a container's cgroup, and what nodes can't.

The driver counts the GPU memory of each cgroup since release 615 (CUDA 13.4). The hook runs before the container's
first process, and a hook that fails keeps the container from starting. Contract: NVIDIA's manual "MPS v3 Memory
Partitioning" (docs.nvidia.com/deploy/mps), nvml.h of CUDA 13.4, and the CDI specification, whose hooks are OCI hooks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.snapshot import Platform
from gpuvirt.model.desired.enforcement import DesiredEnforcement
from gpuvirt.model.desired.invalid import Source
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.node.memoryregion import UnreadableUse
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.model.shares.node.records import ShareLimit
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.plain import Plain

LOWEST = 615
"""The first release of NVIDIA's driver that limits the memory of a cgroup."""
LIBRARY = "libnvidia-ml.so."
"""NVML: the beginning of the file's name, of which NVIDIA's CDI spec mounts one with the driver's version."""
PROGRAM = "memory-limit"
HOOK_S = 10
"""The time of the hook, in which a driver that hangs lets the container fail."""
NO_HARD_LIMIT = "max"


class LimitProgram(msgspec.Struct, frozen=True):
    """The program on a host, as the container runtime starts it; its folder has the loader and the C library."""

    folder: Path
    loader: str
    """The name of the dynamic linker in the folder: `ld-linux-x86-64.so.2`."""
    cgroups: Path
    """The mount point of cgroup v2."""
    library: str
    """NVML of the driver on the host."""

    def command(self, verb: str, *arguments: str) -> Sequence[str]:
        """Return the command that sets or gets limits."""
        folder = str(self.folder)
        loader = (f"{folder}/{self.loader}", "--inhibit-cache", "--library-path", folder)
        return (*loader, f"{folder}/{PROGRAM}", verb, self.library, str(self.cgroups), *arguments)


def why_not(platform: Platform) -> str | None:
    """Return what keeps a node's driver from limiting memory, None if it can, or no driver is loaded."""
    version = platform.nvidia_version
    if version is None:
        return None
    release = version.partition(".")[0]
    if not (release.isascii() and release.isdecimal() and int(release) >= LOWEST):
        return f"NVIDIA's driver {version}"
    return None if platform.cgroup_v2 else "a node without cgroup v2"


def effective(
    desired: DesiredEnforcement | None, otherwise: Enforcement | None, platform: Platform
) -> tuple[DesiredEnforcement | None, str | None]:
    """Return the enforcement that a node has, and what keeps its driver from limiting memory as it is to.

    `otherwise` takes the place of a driver that can't; the source then has both.
    """
    if desired is None or not desired.value.has_driver or (why := why_not(platform)) is None:
        return desired, None
    if otherwise is None or otherwise.has_driver:
        return desired, why
    place = f"settings $.shares.otherwise, since {why} can't do {desired.value} ({desired.source.where})"
    return DesiredEnforcement(otherwise, Source(desired.source.origin, place)), None


def library_in(edits: Fields) -> str | None:
    """Return the path of the driver's NVML on the host by the mounts of NVIDIA's CDI spec; None: it mounts none."""
    mounts = edits.get("mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        path = mount.get("hostPath") if isinstance(mount, dict) else None
        if isinstance(path, str) and PurePath(path).name.startswith(LIBRARY):
            return path
    return None


def hooks(limit: ShareLimit, gpu: GpuId, program: LimitProgram) -> Sequence[Plain]:
    """Return the hook of a container with a limit; a soft limit is memory that the container has in any case."""
    limited = str(limit.memory_mib << 20)
    command = program.command("set", gpu, limited, NO_HARD_LIMIT if limit.is_soft else limited)
    return [{"hookName": "createRuntime", "path": command[0], "args": list(command), "timeout": HOOK_S}]


def used(containers: Sequence[tuple[PodUid, str]], output: str) -> Mapping[tuple[PodUid, str], int | UnreadableUse]:
    """Return the bytes that containers use by the output of `get` for them, in their order."""
    found: dict[tuple[PodUid, str], int | UnreadableUse] = {}
    for container, line in zip(containers, output.splitlines(), strict=False):
        is_number = line.isascii() and line.isdecimal()
        found[container] = int(line) if is_number else UnreadableUse(f"by NVIDIA's driver: {line.removeprefix('? ')}")
    return found

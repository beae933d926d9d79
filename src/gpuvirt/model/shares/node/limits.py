"""The limit of a share: its size, and the mounts, variables and hooks that enforce it in a container."""

from collections.abc import Mapping, Sequence

import msgspec

from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, sharing
from gpuvirt.model.reasons.sharing import NoLimit
from gpuvirt.model.shares.demand import ContainerName, Units
from gpuvirt.model.shares.node import driverlimit, hamicore, mps
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt.model.shares.node.driverlimit import LimitProgram
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareLimit
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.plain import Plain

VARIABLES = hamicore.VARIABLES | mps.VARIABLES
"""The names of the variables by which limits hold."""


class LimitPaths(msgspec.Struct, frozen=True):
    """The paths of the host that a container with a limit has mounted; those of the other means are empty."""

    library: str = ""
    """HAMi-core's library."""
    preload: str = ""
    """The dynamic linker's list with the library."""
    pipes: str = ""
    """The folder with the sockets of the MPS daemon."""
    program: LimitProgram | None = None
    """The program that sets the limit in NVIDIA's driver."""


NO_PATHS = LimitPaths()


def limit_of(
    units: Units, gpu_units: Units, memory_mib: int, by: Enforcement = Enforcement.HAMI_CORE, *, soft: bool = False
) -> ShareLimit:
    """Return the limit of a container with some of a GPU's units; 0 would mean no limit, so it is at least 1.

    Only MPS takes memory back that a container uses beyond a soft limit; without it, others would lack their own.
    """
    memory, compute = units * memory_mib // gpu_units, units * 100 // gpu_units
    return ShareLimit(max(memory, 1), max(compute, 1), by, soft and by is Enforcement.DRIVER_MPS)


def with_limits(pod: PodRecord, node: NodeSharing, *, requires: bool = False, soft: bool = False) -> PodRecord | Reason:
    """Return the record of a new pod with a limit for each container that has a part of a GPU, or why that can't be.

    Nobody else has a share of the GPUs of a container that has whole ones. `requires`: the pod asks for limits.
    `soft`: it asks for soft ones.
    """
    if not node.enforcement.is_limit:
        return (
            Reason(
                ReasonCode.LIMIT_REQUIRED,
                f"pod {pod.namespace}/{pod.name}",
                "requires an enforced limit for its share of a GPU, but this node does not enforce shares, so the pod"
                " does not start",
                (Seen("gpuvirt.io/enforcement", "required"), Seen("shares.enforcement", "none")),
                "kubectl label node NODE --overwrite gpuvirt.io/shares.enforcement=hami-core, or mps; or remove the"
                " pod's annotation",
            )
            if requires
            else pod
        )
    limited: dict[ContainerName, ContainerRecord] = {}
    for name, share in pod.containers.items():
        limited[name] = share
        if share.units >= node.whole:
            continue
        (gpu,) = share.gpus
        if gpu not in node.memory_mib:
            return sharing.limit_not_possible(gpu, NoLimit.MEMORY, "no shares.gpu_memory_mib")
        limit = limit_of(share.units, node.capacity[gpu], node.memory_mib[gpu], node.enforcement, soft=soft)
        limited[name] = msgspec.structs.replace(share, limit=limit)
    return msgspec.structs.replace(pod, containers=limited)


def variables(limit: ShareLimit, gpu: GpuId) -> Mapping[str, str]:
    """Return the variables of a container with a limit; it has a part of one GPU."""
    found: dict[str, str] = {}
    if limit.by.has_library:
        found |= hamicore.variables(limit)
    if limit.by.has_daemon:
        found |= mps.variables(limit, gpu)
    return found


def with_limit(edits: Fields, limit: ShareLimit, gpu: GpuId, paths: LimitPaths) -> Fields:
    """Return the edits of a container's CDI device with the mounts and the hook of its limit on a GPU."""
    library = hamicore.mounts(paths.library, paths.preload) if limit.by.has_library else ()
    daemon = mps.mounts(paths.pipes) if limit.by.has_daemon else ()
    hooks = driverlimit.hooks(limit, gpu, paths.program) if paths.program is not None else ()
    return {**edits, **_added(edits, "mounts", (*library, *daemon)), **_added(edits, "hooks", hooks)}


def _added(edits: Fields, name: str, ours: Sequence[Plain]) -> Fields:
    theirs = edits.get(name)
    return {name: [*(theirs if isinstance(theirs, list) else ()), *ours]} if ours else {}

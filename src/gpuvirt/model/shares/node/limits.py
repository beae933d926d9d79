"""The limit of a share: its size, and the mounts and variables that enforce it in a container."""

from collections.abc import Mapping

import msgspec

from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, sharing
from gpuvirt.model.reasons.sharing import NoLimit
from gpuvirt.model.shares.demand import ContainerName, Units
from gpuvirt.model.shares.node import hamicore, mps
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareLimit
from gpuvirt.model.shares.placement import GpuId

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


NO_PATHS = LimitPaths()


def limit_of(units: Units, gpu_units: Units, memory_mib: int, by: Enforcement = Enforcement.HAMI_CORE) -> ShareLimit:
    """Return the limit of a container with some of a GPU's units; 0 would mean no limit, so it is at least 1."""
    return ShareLimit(max(units * memory_mib // gpu_units, 1), max(units * 100 // gpu_units, 1), by)


def with_limits(pod: PodRecord, node: NodeSharing, *, requires: bool = False) -> PodRecord | Reason:
    """Return the record of a new pod with a limit for each container that has a part of a GPU, or why that can't be.

    Nobody else has a share of the GPUs of a container that has whole ones. `requires`: the pod asks for limits.
    """
    if not node.enforcement.is_limit:
        return (
            Reason(
                ReasonCode.LIMIT_REQUIRED,
                f"pod {pod.namespace}/{pod.name}",
                "requires an enforced limit for its share of a GPU, but this node does not enforce shares, so the pod"
                " does not start",
                (Seen("gpuvirt.io/enforcement", "required"), Seen("shares.enforcement", "none")),
                "kubectl label node NODE gpuvirt.io/shares.enforcement=hami-core, or mps; or remove the pod's"
                " annotation",
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
        limit = limit_of(share.units, node.capacity[gpu], node.memory_mib[gpu], node.enforcement)
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


def with_mounts(edits: Fields, limit: ShareLimit, paths: LimitPaths) -> Fields:
    """Return the edits of a container's CDI device with the mounts of its limit."""
    theirs = edits.get("mounts")
    library = hamicore.mounts(paths.library, paths.preload) if limit.by.has_library else ()
    daemon = mps.mounts(paths.pipes) if limit.by.has_daemon else ()
    return {**edits, "mounts": [*(theirs if isinstance(theirs, list) else ()), *library, *daemon]}

"""The use of GPU memory by pods with limits: the sum of their containers, for lists and the node's GpuNode."""

from collections.abc import Iterator

import msgspec

from gpuvirt.model.shares.node.memoryregion import MemoryUses
from gpuvirt.model.shares.node.records import ShareRecords

_MIB = 1 << 20


class PodMemory(msgspec.Struct, frozen=True):
    """The memory of the containers of one pod that have a limit."""

    namespace: str
    pod: str
    limit_mib: int
    """Their limits together."""
    used_mib: int | None
    """None while it is unknown, or no process has used the GPU."""


def memory_of_pods(records: ShareRecords, uses: MemoryUses) -> tuple[PodMemory, ...]:
    """Return the memory of the pods that have a limit, by namespace and name."""
    return tuple(sorted(_memory(records, uses), key=lambda memory: (memory.namespace, memory.pod)))


def _memory(records: ShareRecords, uses: MemoryUses) -> Iterator[PodMemory]:
    for uid, pod in records.pods.items():
        limits = {name: share.limit.memory_mib for name, share in pod.containers.items() if share.limit is not None}
        if not limits:
            continue
        found = [uses[uid, name] for name in limits if (uid, name) in uses]
        known = [use for use in found if isinstance(use, int)]
        used = sum(known) // _MIB if known and len(known) == len(found) else None
        yield PodMemory(pod.namespace, pod.name, sum(limits.values()), used)

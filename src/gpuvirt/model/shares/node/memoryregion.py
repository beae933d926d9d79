"""A container's use of its GPU's memory, by the region in which HAMi-core counts it.

The region is a file of the container, which can write anything there: the values are the container's own report, and
any bytes are an answer. Contract: `shared_region_t` of Project-HAMi/HAMi-core 8f3a89c, version 1.2, as a compiler for
x86-64 or arm64 lays it out (little-endian, glibc's `sem_t` of 32 bytes).
"""

import struct
from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.node.records import ShareRecords

MAGIC, VERSION = 19920718, (1, 2)
HEADER_BYTES = 1856
"""Of the region, before the slots of processes."""
SLOT_BYTES = 1960
SLOTS = 1024
COUNT_AT = HEADER_BYTES + SLOTS * SLOT_BYTES
"""The place of the number of slots that were ever used, four bytes."""
_HEADER = struct.Struct("<iII")
_COUNT = struct.Struct("<i")
_TOTAL = struct.Struct("<Q")
_TOTAL_AT = 8 + 32
"""Of a slot: after the two pids, and the first GPU's contexts, modules, data and offset."""
MOST_BYTES = 1 << 50
"""More than any GPU has: a sum above it is no answer."""


class UnreadableUse(msgspec.Struct, frozen=True):
    """A use of memory that can't be read, with the reason."""

    why: str


MemoryUses = Mapping[tuple[PodUid, str], int | UnreadableUse]
"""The bytes that each container uses, by its pod and its name. A container without an entry has no region: no process
of it has used the GPU by HAMi-core's library yet, or it is unknown."""


def count_of_slots(header: bytes, count: bytes) -> int | UnreadableUse:
    """Return how many slots have to be read, from the beginning of the region and the four bytes at `COUNT_AT`."""
    if len(header) < HEADER_BYTES or len(count) < _COUNT.size:
        return UnreadableUse("its region is shorter than HAMi-core's region")
    magic, major, minor = _HEADER.unpack_from(header)
    if magic != MAGIC:
        return UnreadableUse("its region is not initialised by HAMi-core")
    if (major, minor) != VERSION:
        return UnreadableUse(f"its region has version {major}.{minor}; expected {VERSION[0]}.{VERSION[1]} of HAMi-core")
    (number,) = _COUNT.unpack_from(count)
    if not 0 <= number <= SLOTS:
        return UnreadableUse(f"its region has {number} processes; expected at most {SLOTS}")
    return int(number)


def used_bytes(slots: bytes) -> int | UnreadableUse:
    """Return the memory that the processes of these slots use together; a container with a limit has one GPU."""
    used = 0  # a slot that is free has 0
    for at in range(0, len(slots) - SLOT_BYTES + 1, SLOT_BYTES):
        used += _TOTAL.unpack_from(slots, at + _TOTAL_AT)[0]
    return used if used <= MOST_BYTES else UnreadableUse("its region counts more memory than a GPU has")


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

"""Finds the allocations of the container that the kubelet is admitting, one resource after another.

The kubelet names no pod in its requests. It admits one container after another, calls Allocate once for each of its
resources, and records all of the container's devices before it goes on to the next container (devicemanager:
`allocateContainerResources`). So an allocated device that the kubelet has not recorded yet belongs to the container
that it is admitting now. If the record was written in between, or could not be read, the device counts as another
container's: then Allocate refuses the rest of its IOMMU group.
"""

from collections.abc import Iterable, Sequence

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.ledger import Consumer, Entry

Key = tuple[ResourceName, DeviceId]


class Unfinished:
    """The allocations of this process that may belong to a container whose admission is not finished."""

    def __init__(self) -> None:
        self._recorded: dict[str, dict[Key, frozenset[Consumer]]] = {}
        """The containers in the kubelet's record for the devices of each allocation, just before that allocation."""

    def add(self, given: Sequence[Entry], recorded: Recorded | Unknown) -> None:
        """Record a new allocation, with the kubelet's record from just before it."""
        if not isinstance(recorded, Unknown):
            for entry in given:
                key = entry.resource, entry.device
                self._recorded.setdefault(entry.allocation, {})[key] = recorded.get(key, frozenset())

    def now(self, entries: Iterable[Entry], recorded: Recorded | Unknown) -> frozenset[str]:
        """Return the allocations of the container that the kubelet is admitting now."""
        waiting = {entry.allocation for entry in entries if entry.consumer is None}
        self._recorded = {allocation: had for allocation, had in self._recorded.items() if allocation in waiting}
        if isinstance(recorded, Unknown):
            return frozenset()
        return frozenset(
            allocation
            for allocation, had in self._recorded.items()
            if all(recorded.get(key, frozenset()) <= consumers for key, consumers in had.items())
        )

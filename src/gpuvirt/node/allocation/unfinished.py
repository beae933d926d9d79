"""Tells which allocations belong to the container that the kubelet is admitting, one resource after another.

The kubelet names no pod when it asks. It admits one container after another, asks once for each of its resources, and
records all of the container's devices before it goes on to the next (devicemanager: `allocateContainerResources`). So a
device that it has not recorded since it was given is of the container that is asking now. A record that was written in
between, or could not be read, makes the device another container's: then the rest of its group is refused.
"""

from collections.abc import Iterable, Mapping, Sequence

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Consumer, Entry
from gpuvirt.model.allocation.recorded import Recorded

Key = tuple[ResourceName, DeviceId]


class Unfinished:
    """The allocations of this process that may be of a container which is still asking."""

    def __init__(self) -> None:
        self._recorded: dict[str, Mapping[Key, frozenset[Consumer]]] = {}
        """The containers that the kubelet had recorded for the devices of each allocation when they were given."""

    def add(self, given: Sequence[Entry], recorded: Recorded | Unknown) -> None:
        """Take an allocation, with what the kubelet had recorded just before."""
        if not isinstance(recorded, Unknown):
            for entry in given:
                key = entry.resource, entry.device
                had = recorded.get(key, frozenset())
                self._recorded[entry.allocation] = {**self._recorded.get(entry.allocation, {}), key: had}

    def now(self, entries: Iterable[Entry], recorded: Recorded | Unknown) -> frozenset[str]:
        """Return the allocations of the container that asks now."""
        waiting = {entry.allocation for entry in entries if entry.consumer is None}
        self._recorded = {one: had for one, had in self._recorded.items() if one in waiting}
        if isinstance(recorded, Unknown):
            return frozenset()
        return frozenset(
            allocation
            for allocation, had in self._recorded.items()
            if all(recorded.get(key, frozenset()) <= consumers for key, consumers in had.items())
        )

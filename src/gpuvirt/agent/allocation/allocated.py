"""The allocations in the ledger and in the kubelet's newest record, read again for each request for devices.

The kubelet names no pod in its requests. It admits one container after another, calls Allocate once for each of its
resources, and records all of the container's devices before it goes on to the next container (devicemanager:
`allocateContainerResources`). So an allocated device that the kubelet has not recorded yet belongs to the container
that it is admitting now. If the record was written in between, or could not be read, the device counts as another
container's: then Allocate refuses the rest of its IOMMU group.
"""

from collections.abc import Iterable, Sequence

import msgspec

from gpuvirt.agent.known.state import NodeState
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices, find_allocated
from gpuvirt.model.allocation.allocations import (
    Consumers,
    ReadRecorded,
    Recorded,
    Unknown,
    any_consumer,
    with_consumers,
)
from gpuvirt.model.allocation.ledger import Consumer, Entry, Known, KubeletAccount, adopt
from gpuvirt.model.allocation.pluginanswers import PluginAnswer, vfio_ids
from gpuvirt.model.allocation.resourcerules import ResourceRules

Entries = tuple[Entry, ...]

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


class Allocated(msgspec.Struct, frozen=True):
    """The allocations at one moment."""

    entries: Entries
    """The entries of the ledger and of the record; the ledger's own object if the record has no others."""
    allocated_devices: AllocatedDevices
    """The allocated devices of the entries, by device and by IOMMU group."""
    by_ledger: AllocatedDevices
    """The same, but only with the containers that the ledger names."""
    unfinished: frozenset[str]
    """The allocations of the container that the kubelet is admitting now."""
    recorded: Recorded | Unknown


class Allocations:
    """Reads the allocations. The allocated devices are found again if the ledger, the record or the host changes."""

    def __init__(self, state: NodeState, clock: Clock, recorded: ReadRecorded) -> None:
        """`recorded` reads the kubelet's record of its allocations."""
        self._state = state
        self._clock = clock
        self._recorded = recorded
        self._unfinished = Unfinished()
        self._found: tuple[Entries, AllocatedDevices] | None = None
        """The last entries, with the allocated devices."""
        self._adopted: tuple[Entries, Recorded | Unknown, Known, ResourceRules, tuple[Entries, Consumers]] | None = None
        """The last ledger entries, record, host and resources, with the entries that follow from them."""

    def read(self) -> Allocated:
        """Return the present allocations."""
        recorded = self._recorded()
        unfinished = self._unfinished.now(self._state.ledger.entries, recorded)
        known, consumers = self._with_recorded(recorded)
        entries = with_consumers(known, consumers, unfinished)
        by_ledger = self.allocated_devices(known)
        allocated_devices = by_ledger if entries is known else find_allocated(entries, self._state.ledger.resources)
        return Allocated(entries, allocated_devices, by_ledger, unfinished, recorded)

    def add(self, given: Sequence[Entry], recorded: Recorded | Unknown) -> None:
        """Record a new allocation, with the kubelet's record from just before it."""
        self._unfinished.add(given, recorded)

    def allocated_devices(self, entries: Entries) -> AllocatedDevices:
        """Return the allocated devices of entries."""
        found, ours = self._found, self._state.ledger.resources
        if found is None or found[0] is not entries or found[1].ours is not ours:
            found = self._found = entries, find_allocated(entries, ours)
        return found[1]

    def _with_recorded(self, recorded: Recorded | Unknown) -> tuple[Entries, Consumers]:
        """Return the entries of the ledger and the record, and the containers of recorded devices."""
        ledger, last = self._state.ledger, self._adopted
        entries, known, rules = ledger.entries, ledger.known, ledger.rules
        now = entries, recorded, known, rules
        if last is None or any(before is not value for before, value in zip(last, now, strict=False)):
            last = self._adopted = (*now, self._adopt(entries, recorded, known, rules))
        return last[4]

    def _adopt(
        self, entries: Entries, recorded: Recorded | Unknown, known: Known, rules: ResourceRules
    ) -> tuple[Entries, Consumers]:
        listed = recorded.listed if isinstance(recorded, Unknown) else recorded
        consumers = any_consumer({key: pods for key, pods in listed.items() if _may_be_vms(key[1], pods, known)})
        if not consumers:
            return entries, {}
        return adopt(
            entries, KubeletAccount(self._clock.now(), self._clock.monotonic_s(), consumers), known, rules
        ), consumers


def _may_be_vms(device: DeviceId, consumers: Iterable[Consumer], known: Known) -> bool:
    """Return whether an id, or what its plugin answered, may be a device that VMs get."""
    return device in known or any(
        isinstance(consumer.answer, PluginAnswer) and any(vfio_ids(consumer.answer)) for consumer in consumers
    )

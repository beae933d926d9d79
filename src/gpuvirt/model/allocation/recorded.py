"""The allocations that the kubelet has recorded in its checkpoint."""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Consumer, Entry

Recorded = Mapping[tuple[ResourceName, DeviceId], frozenset[Consumer]]
"""The containers that have each device; an init container and an app container of one pod may share a device."""

Consumers = Mapping[tuple[ResourceName, DeviceId], Consumer]
"""One container of each device."""

ReadRecorded = Callable[[], Recorded | Unknown]
"""A function that reads the record, callable from any thread; it returns Unknown if the record can't be read."""


def any_consumer(recorded: Recorded) -> Consumers:
    """Return one container of each device."""
    return {key: next(iter(consumers)) for key, consumers in recorded.items() if consumers}


def with_consumers(entries: tuple[Entry, ...], consumers: Consumers, unfinished: Container[str]) -> tuple[Entry, ...]:
    """Return the entries with the recorded containers, except those of allocations that are not finished.

    If the record adds nothing, the result is the same tuple.
    """
    if not any(entry.consumer is None and (entry.resource, entry.device) in consumers for entry in entries):
        return entries
    return tuple(
        replace(entry, consumer=consumers.get((entry.resource, entry.device)))
        if entry.consumer is None and entry.allocation not in unfinished
        else entry
        for entry in entries
    )

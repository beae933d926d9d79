"""The allocations of GPUs to pods, and those that the kubelet has recorded in its checkpoint, or that they are unknown.

Allocations and `Unknown` are two types, and no default turns one into the other.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName
from gpuvirt.facts.notknown import NotKnown
from gpuvirt.model.allocation.ledger import Consumer, Entry
from gpuvirt.model.allocation.pluginanswers import PluginAnswer, combine_answers
from gpuvirt.model.reasons import Reason

Allocations = Mapping[PciAddress, tuple[str, ...]]
"""The pods that each GPU, or a part of it, is allocated to; a GPU that is missing is not allocated."""


Recorded = Mapping[tuple[ResourceName, DeviceId], frozenset[Consumer]]
"""The containers that have each device; an init container and an app container of one pod may share a device."""


@dataclass(frozen=True, slots=True)
class Unknown(NotKnown):
    """The allocations are unknown: any device may be allocated."""

    reason: Reason | None = None
    """Why they are unknown; None if the kubelet has not reported since devices were last withdrawn."""
    known: Allocations = field(default_factory=dict)
    """The allocations that are known; there may be more."""
    listed: Recorded = field(default_factory=dict)
    """The allocations that an incomplete record has."""

    def reason_for(self, subject: str) -> Reason | None:
        """Return the reason with a device or an isolation unit as its subject."""
        return None if self.reason is None else replace(self.reason, subject=subject)


def pods_of(recorded: Recorded | Unknown, key: tuple[ResourceName, DeviceId]) -> frozenset[PodUid] | UnsetType:
    """Return the pods for which the kubelet has recorded a device, as far as the record was read; unset for none."""
    listed = recorded.listed if isinstance(recorded, Unknown) else recorded  # unknown: the rest is no evidence
    return frozenset(found.pod_uid for found in listed.get(key, ()) if found.pod_uid is not None) or UNSET


Consumers = Mapping[tuple[ResourceName, DeviceId], Consumer]
"""One container of each device."""

ReadRecorded = Callable[[], Recorded | Unknown]
"""A function that reads the record, callable from any thread; it returns Unknown if the record can't be read."""


def any_consumer(recorded: Recorded) -> Consumers:
    """Return one container of each device, with the answers that all its containers got."""
    return {key: _one_of(consumers) for key, consumers in recorded.items() if consumers}


def _one_of(consumers: frozenset[Consumer]) -> Consumer:
    first, *others = consumers
    answers = [consumer.answer for consumer in consumers if isinstance(consumer.answer, PluginAnswer)]
    return dataclasses.replace(first, answer=combine_answers(answers)) if others and answers else first


def with_consumers(entries: tuple[Entry, ...], consumers: Consumers, unfinished: Container[str]) -> tuple[Entry, ...]:
    """Return the entries with the recorded containers, except those of allocations that are not finished.

    If the record adds nothing, the result is the same tuple.
    """
    if not any(entry.consumer is None and (entry.resource, entry.device) in consumers for entry in entries):
        return entries
    return tuple(
        replace(entry, consumer=consumer.in_ledger)
        if entry.consumer is None
        and entry.allocation not in unfinished
        and (consumer := consumers.get((entry.resource, entry.device))) is not None
        else entry
        for entry in entries
    )

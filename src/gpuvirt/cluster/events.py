"""Kubernetes' events: what somebody should hear of an object once.

Source: events.k8s.io/v1. Events of objects without a namespace lie in the namespace `default`, where `kubectl describe`
looks for them. They are told once, and not kept trying: an object's status says what is so.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.resources import Metadata, Resource

log = logging.getLogger(__name__)

HOME = "default"
"""The namespace of events about objects that have none."""
MOST_NOTE = 1000
"""Characters; the API's limit is 1024."""


class Kind(StrEnum):
    """Whether somebody should worry."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class EventDraft:
    """One thing that has changed."""

    kind: Kind
    reason: str
    note: str


class About(msgspec.Struct, frozen=True, rename="camel"):
    """The object that an event is about."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Who tells."""

    controller: str
    """What kind of program: `gpuvirt.io/node`."""
    instance: str
    """Which one of them."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str


class Event(msgspec.Struct, frozen=True, rename="camel"):
    """An event, as far as it is ours to write."""

    metadata: _Metadata
    event_time: str
    reporting_controller: str
    reporting_instance: str
    action: str
    reason: str
    regarding: About
    note: str
    type: str


class _Created(msgspec.Struct, frozen=True):
    """What is read of an event that was made."""

    metadata: Metadata


def events_of(delta: Iterable[tuple[About, EventDraft]], by: Reporter, at: datetime) -> list[Event]:
    """Return events of one moment, a microsecond apart: the moment is part of an event's name."""
    return [
        event_of(event, about, by, at + timedelta(microseconds=number)) for number, (about, event) in enumerate(delta)
    ]


def event_of(event: EventDraft, about: About, by: Reporter, at: datetime) -> Event:
    """Return an event; its name is the object's and the moment, as for all events."""
    return Event(
        metadata=_Metadata(f"{about.name}.{int(at.timestamp() * 1_000_000):x}", about.namespace or HOME),
        event_time=f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        reporting_controller=by.controller,
        reporting_instance=by.instance,
        action="Report",
        reason=event.reason,
        regarding=about,
        note=event.note[:MOST_NOTE],
        type=event.kind,
    )


async def tell(client: Client, events: Iterable[Event]) -> None:
    """Write events; where one can't be written, the rest is not tried."""
    for event in events:
        try:
            await client.create(Resource("events", "events.k8s.io", "v1", event.metadata.namespace), event, _Created)
        except ApiError as error:
            log.info("no event says that %s: %s", event.note, error)
            return

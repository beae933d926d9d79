"""Kubernetes events about objects, for users.

Source: events.k8s.io/v1. Events about cluster-scoped objects are in the namespace `default`, where `kubectl describe`
looks for them. `write` does not retry, because the status of the object has the same information.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.resources import Metadata, Resource

log = logging.getLogger(__name__)

EVENTS = Resource("events")
"""The events of core/v1, which `kubectl get events` shows."""
DEFAULT_NAMESPACE = "default"
"""The namespace of events about cluster-scoped objects."""
MOST_NOTE = 1000
"""The most characters of a note; the API's limit is 1024."""


class EventLevel(StrEnum):
    """The type of an event."""

    NORMAL = "Normal"
    WARNING = "Warning"


class EventDraft(msgspec.Struct, frozen=True):
    """The type, reason and text of an event."""

    kind: EventLevel
    reason: str
    note: str


class About(msgspec.Struct, frozen=True, rename="camel"):
    """The object that an event is about."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""


class Reporter(msgspec.Struct, frozen=True):
    """The program that writes an event."""

    controller: str
    """The kind of program: `gpuvirt.io/node`."""
    instance: str
    """The instance of the program, such as the node's name."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str


class Event(msgspec.Struct, frozen=True, rename="camel"):
    """An event, with the fields that its reporter writes."""

    metadata: _Metadata
    event_time: str
    reporting_controller: str
    reporting_instance: str
    action: str
    reason: str
    regarding: About
    note: str
    type: str


class Involved(msgspec.Struct, frozen=True):
    """The object that a stored event is about."""

    uid: str = ""


class SeenEvent(msgspec.Struct, frozen=True, rename="camel"):
    """A stored event, as core/v1 shows it; newer reporters give `eventTime` alone."""

    metadata: Metadata
    involved_object: Involved = Involved()
    reason: str = ""
    message: str = ""
    type: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None


def newest(events: Iterable[SeenEvent]) -> str:
    """Return the reason and the message of the newest event, empty without events."""
    last = max(events, key=lambda event: event.last_timestamp or event.event_time or "", default=None)
    return f"{last.reason}: {last.message}" if last is not None else ""


class _Created(msgspec.Struct, frozen=True):
    """The part of a created event that is decoded."""

    metadata: Metadata


def events_of(drafts: Iterable[tuple[About, EventDraft]], by: Reporter, at: datetime) -> list[Event]:
    """Return events of one moment, a microsecond apart, because the time is part of an event's name."""
    return [
        event_of(draft, about, by, at + timedelta(microseconds=number)) for number, (about, draft) in enumerate(drafts)
    ]


def event_of(draft: EventDraft, about: About, by: Reporter, at: datetime) -> Event:
    """Return an event. Its name consists of the object's name and the time, as is usual for events."""
    return Event(
        metadata=_Metadata(f"{about.name}.{int(at.timestamp() * 1_000_000):x}", about.namespace or DEFAULT_NAMESPACE),
        event_time=f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        reporting_controller=by.controller,
        reporting_instance=by.instance,
        action="Report",
        reason=draft.reason,
        regarding=about,
        note=draft.note[:MOST_NOTE],
        type=draft.kind,
    )


async def create(client: Client, event: Event) -> None:
    """Write an event; raises ApiError."""
    await client.create(Resource("events", "events.k8s.io", "v1", event.metadata.namespace), event, _Created)


async def write(client: Client, events: Iterable[Event]) -> None:
    """Write events, and stop at the first that fails."""
    for event in events:
        try:
            await create(client, event)
        except ApiError as error:
            log.info("could not write the event %r: %s", event.note, error)
            return

"""What an admin should hear of when a GpuNode's status changes, as Kubernetes' events.

Source: events.k8s.io/v1. Events of objects without a namespace lie in the namespace `default`, where `kubectl describe`
looks for them. They are told once, and not kept trying: the status says what is so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from gpuvirt.cluster.kinds.conditions import Condition
from gpuvirt.cluster.kinds.gpunode import API_VERSION, KIND, READY, GpuNode, Status
from gpuvirt.cluster.resources import Resource

EVENTS = Resource("events", "events.k8s.io", "v1", "default")
REPORTER = "gpuvirt.io/node"
MOST_NOTE = 1000
"""Characters; the API's limit is 1024."""


class Kind(StrEnum):
    """Whether somebody should worry."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that has changed."""

    kind: Kind
    reason: str
    note: str


class _Regarding(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    name: str
    uid: str


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
    regarding: _Regarding
    note: str
    type: str


def happenings(before: Status | None, after: Status) -> Iterator[Happening]:
    """Yield what has changed between two statuses; a first one is no news."""
    if before is None:
        return
    modes = {gpu.address: gpu.mode for gpu in before.gpus}
    for gpu in after.gpus:
        if (mode := modes.get(gpu.address, gpu.mode)) != gpu.mode:
            yield Happening(Kind.NORMAL, "ModeChanged", f"{gpu.address} is in mode {gpu.mode} now, and was in {mode}")
    for address in sorted(modes.keys() - {gpu.address for gpu in after.gpus}):
        yield Happening(Kind.WARNING, "GpuGone", f"{address} is no longer there")
    ready, was = _ready(after), _ready(before)
    if ready is not None and (was is None or (ready.status, ready.reason) != (was.status, was.reason)):
        kind = Kind.NORMAL if ready.status == "True" else Kind.WARNING
        yield Happening(kind, ready.reason, ready.message or "all GPUs are as they are wanted")


def event_of(happening: Happening, node: GpuNode, at: datetime) -> Event:
    """Return an event about a GpuNode."""
    name = node.metadata.name
    return Event(
        metadata=_Metadata(f"{name}.{int(at.timestamp() * 1_000_000):x}", EVENTS.namespace or ""),
        event_time=f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        reporting_controller=REPORTER,
        reporting_instance=name,
        action="Report",
        reason=happening.reason,
        regarding=_Regarding(API_VERSION, KIND, name, node.metadata.uid),
        note=happening.note[:MOST_NOTE],
        type=happening.kind,
    )


def _ready(status: Status) -> Condition | None:
    return next((one for one in status.conditions if one.type == READY), None)

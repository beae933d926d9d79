"""Kubernetes events for admins: one event each time that a state begins, and again after the controller restarts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.policy.policies import InvalidValue
from gpuvirt.controller.policy.status import INVALID, ReadyCondition
from gpuvirt.kube import events
from gpuvirt.kube.client import Client
from gpuvirt.kube.events import About, EventDraft, EventLevel, Reporter
from gpuvirt.kube.kinds.clusterpolicy import API_VERSION, KIND, Choice

LEFT_ALONE, DRAINING = "LeftAlone", "Draining"
REPORTER = Reporter("gpuvirt.io/controller", "gpuvirt-controller")


class Announcement(msgspec.Struct, frozen=True):
    """A state of one object, for which an event is written when the state begins."""

    about: About
    event: EventDraft
    topic: str = ""
    """Tells two states with the same object and reason apart: each gets an event of its own."""


def invalid_announcements(choice: Choice, found: Sequence[InvalidValue]) -> Iterator[Announcement]:
    """Yield the announcements of invalid values: one about the policy for all of them, and one about each node."""
    if found:
        note = " | ".join(value.text for value in found)
        yield Announcement(_policy(choice), EventDraft(EventLevel.WARNING, INVALID, note), note)
    for value in found:
        if value.node:
            about = About("v1", "Node", value.node, value.node)
            yield Announcement(about, EventDraft(EventLevel.WARNING, value.code, value.message), value.message)


def node_announcements(name: str, placement: NodePlacement) -> Iterator[Announcement]:
    """Yield the announcement about a node that waits until its GPUs are free, or that another product serves."""
    # As in the kubelet's events: `kubectl describe node` looks for the name as uid.
    about = About("v1", "Node", name, name)
    if placement.counts and (why := placement.left_alone) is not None:
        yield Announcement(about, EventDraft(EventLevel.NORMAL, LEFT_ALONE, why))
    if placement.counts and (waits := placement.waits) is not None:
        yield Announcement(about, EventDraft(EventLevel.NORMAL, DRAINING, waits))


def policy_announcements(choice: Choice, verdict: ReadyCondition) -> Iterator[Announcement]:
    """Yield the announcement of the policy's `Ready` condition."""
    kind = EventLevel.NORMAL if verdict.ready else EventLevel.WARNING
    note = verdict.message or "all nodes and operands match this policy"
    yield Announcement(_policy(choice), EventDraft(kind, verdict.reason, note))


def _policy(choice: Choice) -> About:
    metadata = choice.stored.metadata
    return About(API_VERSION, KIND, metadata.name, metadata.uid)


class Announcer:
    """Writes an event for each announcement that was not made before."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._announced: Mapping[tuple[About, str, str], Announcement] = {}

    async def announce(self, announcements: Iterable[Announcement]) -> None:
        """Write events for the announcements whose object, reason and topic the previous call did not have."""
        now = {
            (announcement.about, announcement.event.reason, announcement.topic): announcement
            for announcement in announcements
        }
        fresh = [announcement for key, announcement in now.items() if key not in self._announced]
        self._announced = now
        at = self._clock.now()
        drafts = [(announcement.about, announcement.event) for announcement in fresh]
        await events.write(self._client, events.events_of(drafts, REPORTER, at))

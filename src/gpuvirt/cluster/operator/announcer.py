"""What admins hear as events: once each time that it begins to be so, and again after a restart of the controller."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuvirt.clock import Clock
from gpuvirt.cluster import events
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.events import About, EventDraft, Kind, Reporter
from gpuvirt.cluster.kinds.clusterpolicy import API_VERSION, KIND
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.operator.nodes.placement import Placement
from gpuvirt.cluster.operator.policy.invalidstates import InvalidValue
from gpuvirt.cluster.operator.policy.policies import Choice
from gpuvirt.cluster.operator.policy.status import INVALID, Verdict

REPORTER = Reporter("gpuvirt.io/controller", "gpuvirt-controller")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is so now of one object, and worth an event when it begins."""

    about: About
    event: EventDraft
    topic: str = ""
    """What of the object it is about: two topics of one reason are two events."""


def invalid_announcements(choice: Choice, found: Sequence[InvalidValue]) -> Iterator[Announcement]:
    """Yield what is worth an event where the desired state is invalid: about each node, and about the policy."""
    if found:
        note = " | ".join(one.text for one in found)
        yield Announcement(_policy(choice), EventDraft(Kind.WARNING, INVALID, note), note)
    for one in found:
        if one.node:
            about = About("v1", "Node", one.node, one.node)
            yield Announcement(about, EventDraft(Kind.WARNING, one.code, one.message), one.message)


def node_announcements(nodes: Iterable[Node], placements: Mapping[str, Placement]) -> Iterator[Announcement]:
    """Yield what is worth an event about nodes."""
    for node in nodes:
        name = node.metadata.name
        placement = placements.get(name)
        if placement is None:
            continue
        about = About("v1", "Node", name, name)  # as the kubelet's: `kubectl describe node` looks for the name as uid
        if placement.leaving and placement.counts:
            note = f"the node becomes {placement.workload} once its GPUs are free: {', '.join(placement.leaving)}"
            yield Announcement(about, EventDraft(Kind.NORMAL, "Draining", note))


def policy_announcements(choice: Choice, verdict: Verdict) -> Iterator[Announcement]:
    """Yield what is worth an event about the policy."""
    kind = Kind.NORMAL if verdict.ready else Kind.WARNING
    note = verdict.message or "all nodes and operands are as this policy wants them"
    yield Announcement(_policy(choice), EventDraft(kind, verdict.reason, note))


def _policy(choice: Choice) -> About:
    metadata = choice.stored.metadata
    return About(API_VERSION, KIND, metadata.name, metadata.uid)


class Announcer:
    """Tells what was not told yet."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._told: Mapping[tuple[About, str, str], Announcement] = {}

    async def tell(self, announcements: Iterable[Announcement]) -> None:
        """Write events of what is so now and was not before: for one object, of another reason than before."""
        now = {(one.about, one.event.reason, one.topic): one for one in announcements}
        fresh = [one for key, one in now.items() if key not in self._told]
        self._told = now
        at = self._clock.now()
        happened = [(one.about, one.event) for one in fresh]
        await events.tell(self._client, events.events_of(happened, REPORTER, at))

"""What admins hear as events: once each time that it begins to be so, and again after a restart of the controller."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.clock import Clock
from gpuvirt.cluster import events
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.events import About, Happening, Kind, Reporter
from gpuvirt.cluster.kinds.clusterpolicy import API_VERSION, KIND
from gpuvirt.cluster.operator.placement import Placement
from gpuvirt.cluster.operator.policies import Choice
from gpuvirt.cluster.operator.shapes import NodeObject
from gpuvirt.cluster.operator.status import Verdict

REPORTER = Reporter("gpuvirt.io/controller", "gpuvirt-controller")


@dataclass(frozen=True, slots=True)
class News:
    """What is so now of one object, and worth an event when it begins."""

    about: About
    happening: Happening


def node_news(nodes: Iterable[NodeObject], placements: Mapping[str, Placement]) -> Iterator[News]:
    """Yield what is worth an event about nodes."""
    for node in nodes:
        name = node.metadata.name
        placement = placements.get(name)
        if placement is None:
            continue
        about = About("v1", "Node", name, name)  # as the kubelet's: `kubectl describe node` looks for the name as uid
        if placement.trouble is not None:
            yield News(about, Happening(Kind.WARNING, str(placement.trouble.code), placement.trouble.text))
        elif placement.leaving and placement.counts:
            note = f"the node becomes {placement.workload} once its GPUs are free: {', '.join(placement.leaving)}"
            yield News(about, Happening(Kind.NORMAL, "Draining", note))


def policy_news(choice: Choice, verdict: Verdict) -> Iterator[News]:
    """Yield what is worth an event about the policy."""
    metadata = choice.stored.metadata
    kind = Kind.NORMAL if verdict.ready else Kind.WARNING
    note = verdict.message or "all nodes and operands are as this policy wants them"
    yield News(About(API_VERSION, KIND, metadata.name, metadata.uid), Happening(kind, verdict.reason, note))


class Announcer:
    """Tells what was not told yet."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._told: Mapping[tuple[About, str], News] = {}

    async def tell(self, news: Iterable[News]) -> None:
        """Write events of what is so now and was not before: for one object, of another reason than before."""
        now = {(one.about, one.happening.reason): one for one in news}
        fresh = [one for key, one in now.items() if key not in self._told]
        self._told = now
        at = self._clock.now()
        await events.tell(self._client, [events.event_of(one.happening, one.about, REPORTER, at) for one in fresh])

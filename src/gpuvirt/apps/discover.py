"""The discoverer as a process: it looks at its host, keeps its node's labels, and says whether it could."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from gpuvirt import __version__
from gpuvirt.clock import Clock, RealClock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.agent.keeping import KeeperDependencies, Tell
from gpuvirt.cluster.agent.nodekeys import Claim, NodeKeys
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Client, Collection, PatchType
from gpuvirt.cluster.failures import ApiError, NotFoundError, retried
from gpuvirt.cluster.keys import Keys, patch_of
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.reflector import Reflector
from gpuvirt.cluster.resources import NODES, Metadata
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.offers.discovery import Labels
from gpuvirt.node.discoverer import LOOK_S, Discoverer, unread_line
from gpuvirt.node.loops.serialworker import SerialWorker, ThreadWorker
from gpuvirt.tasks import keep_going
from gpuvirt.web import exposition
from gpuvirt.web.probes import Answer, Page, Probes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiscoverOptions:
    """Everything that the process is told."""

    kernel: Kernel
    credentials: Credentials
    node: NodeName
    listen: tuple[str, int] | None = None
    """Where probes and metrics are served."""
    clock: Clock = field(default_factory=RealClock)
    workers: Callable[[str], SerialWorker] = ThreadWorker
    every_s: float = LOOK_S
    """From one look at the host to the next."""


class Discovery:
    """One node's."""

    def __init__(self, options: DiscoverOptions) -> None:
        self._options = options
        self._discoverer = Discoverer(options.kernel, options.workers("watching"), options.clock, options.every_s)
        random = Random()  # noqa: S311  it keeps nodes apart, and no secrets
        self._dependencies = KeeperDependencies(Client(options.credentials), options.node, options.clock, random)
        self._keys = NodeKeys(self._dependencies)
        self._observed: Metadata | None = None
        """What the node says, None while that was not heard or there is no such node."""
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Look and label for ever; what fails at the API server is tried again."""
        options, clock = self._options, self._options.clock
        cell = self._discoverer.labels
        claim = Claim(lambda _: Keys(dict(cell.get())), cell.telling)
        nodes = Reflector(
            self._dependencies.client, Collection(NODES, Node, options.node), clock, self._dependencies.random
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._discoverer.run())
            group.create_task(keep_going("node", lambda: nodes.run(self._observe, self._told("node")), clock))
            group.create_task(keep_going("labels", lambda: self._keys.run([claim], self._told("labels")), clock))
            if options.listen is not None:
                host, port = options.listen
                probes = Probes(self.pages())
                group.create_task(keep_going("probes", lambda: probes.run(host, port), clock))

    def missing(self) -> list[str]:
        """Return what is missing until the node says all that there is to say; nothing when it does."""
        seen, observed = self._discoverer.seen, self._observed
        missing = ["the host was not looked at yet"] if seen is None else [unread_line(one) for one in seen.unread]
        missing += self._problems.values()
        if observed is None:
            missing.append(f"node {self._options.node} was not heard of yet")
        elif patch := patch_of([Keys(dict(self._discoverer.labels.get()))], observed):
            missing.append(f"the node has not the labels yet: {', '.join(patch.metadata.labels)}")
        return missing

    def pages(self) -> Mapping[str, Page]:
        """Return the pages that are served."""

        def healthz() -> Answer:
            return Answer(200, "ok\n")

        def readyz() -> Answer:
            missing = self.missing()
            return Answer(503, "".join(f"{line}\n" for line in missing)) if missing else Answer(200, "ok\n")

        def metrics() -> Answer:
            return Answer(200, self._metrics(), exposition.CONTENT_TYPE)

        return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}

    def _metrics(self) -> str:
        labels = self._discoverer.labels.get().items()
        found = [((label, value), 1.0) for label, value in labels if value is not None]
        ready = float(not self.missing())
        return exposition.text_of(
            exposition.gauge(
                "gpuvirt_discovered", "1 for a label that the node is to have.", ("label", "value"), found
            ),
            exposition.gauge("gpuvirt_discover_ready", "1 while the node has them.", (), [((), ready)]),
            exposition.gauge("gpuvirt_info", "The version.", ("version",), [((__version__,), 1.0)]),
        )

    def _observe(self, delta: Delta[Node]) -> None:
        node = delta.objects.get(self._dependencies.key)
        self._observed = node.metadata if node is not None else None
        self._keys.observe(delta)

    def _told(self, who: str) -> Tell:
        def tell(error: ApiError | None) -> None:
            before = self._problems.pop(who, None)
            if error is not None:
                self._problems[who] = str(error)
            if error is not None and str(error) != before:
                log.warning("%s; it is tried again", error)

        return tell


async def label_once(client: Client, node: NodeName, labels: Labels, clock: Clock) -> None:
    """Have a node say it; raises ApiError."""
    await retried(lambda: _label(client, node, labels), clock)


async def _label(client: Client, node: NodeName, labels: Labels) -> None:
    listed = await client.list(Collection(NODES, Node, node))
    found = next((one for one in listed.items if one.metadata.name == node), None)
    if found is None:
        raise NotFoundError(f"there is no node {node} at the API server; kubectl get nodes lists those that there are")
    if patch := patch_of([Keys(dict(labels))], found.metadata):
        await client.patch(NODES, node, patch, PatchType.MERGE, Node)

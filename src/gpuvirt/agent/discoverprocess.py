"""The process of `gpuvirt discover`: observes its host, keeps the labels of its node, and reports its readiness."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random

import msgspec

from gpuvirt import __version__
from gpuvirt.agent.cluster.keeping import SPREAD_S, KeeperDependencies, ReportOutcome
from gpuvirt.agent.cluster.nodelabels import LabelClaim, NodeLabels
from gpuvirt.clock import Clock, RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Discovery
from gpuvirt.hardware import discovery
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, NotFoundError, retried
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import DesiredLabels, patch_of
from gpuvirt.kube.reflector import Reflector, Waits
from gpuvirt.kube.resources import NODES, Collection, Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker, ThreadWorker, WorkerBlockedError
from gpuvirt.model.offers.discovery import Labels, labels_of
from gpuvirt.tasks import keep_going
from gpuvirt.web import exposition
from gpuvirt.web.exposition import Page, PageAnswer
from gpuvirt.web.probes import Probes

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""The time between two observations. GPUs rarely appear without a boot."""
PATIENCE_S = 10.0


class Discoverer:
    """The labels of one node, derived from its host."""

    def __init__(self, kernel: Kernel, worker: SerialWorker, clock: Clock, every_s: float = INTERVAL_S) -> None:
        self.labels: Cell[Labels] = Cell({})
        """The labels that the node should have; none before the first observation."""
        self.seen: Discovery | None = None
        """The last observation."""
        self._kernel = kernel
        self._worker = worker
        self._clock = clock
        self._every_s = every_s

    async def run(self) -> None:
        """Observe the host until cancelled."""
        while True:
            try:
                seen = await self._worker.run(
                    lambda: discovery.discover(self._kernel), name="observe the host", timeout_s=PATIENCE_S
                )
            except WorkerBlockedError as error:
                log.warning("the host can't be observed, so the node's labels stay as they are: %s", error)
            else:
                self._take(seen)
            await self._clock.sleep(self._every_s)

    def _take(self, seen: Discovery) -> None:
        before, self.seen = self.seen, seen
        if before is None or before.unread != seen.unread:
            for unread in seen.unread:
                log.warning("%s; the node's labels that follow from it stay as they are", unread_line(unread))
        labels = labels_of(seen, before)
        if labels != self.labels.get():
            texts = (f"{key}={value}" if value else f"{key} (removed)" for key, value in labels.items())
            log.info("the host's hardware calls for these node labels: %s", ", ".join(texts))
            self.labels.set(labels)


def unread_line(unread: Unread) -> str:
    """Return a line about a file that could not be read."""
    return f"{unread.path} can't be read: {unread.detail}"


class DiscoverOptions(msgspec.Struct, frozen=True):
    """The options of the process."""

    kernel: Kernel
    credentials: Credentials
    node: NodeName
    listen: tuple[str, int] | None = None
    """The address and port of probes and metrics."""
    clock: Clock = msgspec.field(default_factory=RealClock)
    workers: Callable[[str], SerialWorker] = ThreadWorker
    every_s: float = INTERVAL_S
    """The time between two observations of the host."""


class DiscoverProcess:
    """The process of one node."""

    def __init__(self, options: DiscoverOptions) -> None:
        self._options = options
        self._discoverer = Discoverer(options.kernel, options.workers("watching"), options.clock, options.every_s)
        random = Random()  # noqa: S311  it spreads nodes over time, and keeps no secrets
        self._dependencies = KeeperDependencies(Client(options.credentials), options.node, options.clock, random)
        self._keys = NodeLabels(self._dependencies)
        self._observed: Metadata | None = None
        """The metadata of the node, None if it was not observed yet or there is no such node."""
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Observe and label until cancelled; failed requests to the API server are repeated."""
        options, clock = self._options, self._options.clock
        cell = self._discoverer.labels
        claim = LabelClaim(lambda _: DesiredLabels(dict(cell.get())), cell.notifying)
        collection, random = Collection(NODES, Node, options.node), self._dependencies.random
        nodes = Reflector(self._dependencies.client, collection, clock, random, waits=Waits(spread_s=SPREAD_S))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._discoverer.run())
            group.create_task(keep_going("node", lambda: nodes.run(self._observe, self._report("node")), clock))
            group.create_task(keep_going("labels", lambda: self._keys.run([claim], self._report("labels")), clock))
            if options.listen is not None:
                host, port = options.listen
                probes = Probes(self.pages())
                group.create_task(keep_going("probes", lambda: probes.run(host, port), clock))

    def missing(self) -> list[str]:
        """Return the steps that are missing until the node has all its labels; empty when it has them."""
        seen, observed = self._discoverer.seen, self._observed
        missing = ["the host was not observed yet"] if seen is None else [unread_line(unread) for unread in seen.unread]
        missing += self._problems.values()
        if observed is None:
            missing.append(f"the API server has not shown node {self._options.node} yet")
        elif patch := patch_of([DesiredLabels(dict(self._discoverer.labels.get()))], observed):
            missing.append(f"the node does not have these labels yet: {', '.join(patch.metadata.labels)}")
        return missing

    def pages(self) -> Mapping[str, Page]:
        """Return the pages that the process serves."""

        def healthz() -> PageAnswer:
            return PageAnswer(200, "ok\n")

        def readyz() -> PageAnswer:
            missing = self.missing()
            return PageAnswer(503, "".join(f"{line}\n" for line in missing)) if missing else PageAnswer(200, "ok\n")

        def metrics() -> PageAnswer:
            return PageAnswer(200, self._metrics(), exposition.CONTENT_TYPE)

        return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}

    def _metrics(self) -> str:
        labels = self._discoverer.labels.get().items()
        found = [((label, value), 1.0) for label, value in labels if value is not None]
        ready = float(not self.missing())
        return exposition.text_of(
            exposition.gauge(
                "gpuvirt_discovered", "1 for each label that the node should have.", ("label", "value"), found
            ),
            exposition.gauge("gpuvirt_discover_ready", "1 while the node has these labels.", (), [((), ready)]),
            exposition.gauge("gpuvirt_info", "The version.", ("version",), [((__version__,), 1.0)]),
        )

    def _observe(self, delta: Delta[Node]) -> None:
        node = delta.objects.get(self._dependencies.key)
        self._observed = node.metadata if node is not None else None
        self._keys.observe(delta)

    def _report(self, task: str) -> ReportOutcome:
        def report(error: ApiError | None) -> None:
            before = self._problems.pop(task, None)
            if error is not None:
                self._problems[task] = str(error)
            if error is not None and str(error) != before:
                log.warning(
                    "node %s: a request of its %s failed, gpuvirt repeats it: %s", self._options.node, task, error
                )

        return report


async def label_once(client: Client, node: NodeName, labels: Labels, clock: Clock) -> None:
    """Set the labels of a node once; raises ApiError."""
    await retried(lambda: _label(client, node, labels), clock)


async def _label(client: Client, node: NodeName, labels: Labels) -> None:
    listed = await client.list(Collection(NODES, Node, node))
    found = next((item for item in listed.items if item.metadata.name == node), None)
    if found is None:
        raise NotFoundError(f"the API server has no node {node}; kubectl get nodes lists the nodes")
    if patch := patch_of([DesiredLabels(dict(labels))], found.metadata):
        await client.patch(NODES, node, patch, PatchType.MERGE, Node)

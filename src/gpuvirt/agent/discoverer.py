"""Observes the host at intervals, and derives the labels of its node."""

import logging

from gpuvirt.clock import Clock
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Discovery
from gpuvirt.hardware import discovery
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.offers.discovery import Labels, labels_of

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
        """Observe the host for ever."""
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

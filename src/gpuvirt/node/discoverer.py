"""Looks at the host again and again, and says by which labels its node is to be known."""

import logging

from gpuvirt.clock import Clock
from gpuvirt.facts.discovery import Discovery
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware import discovery
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.offers.discovery import Labels, labels_of
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.serialworker import SerialWorker, WorkerBlockedError

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""From one look to the next: GPUs come with a boot, and rarely without one."""
PATIENCE_S = 10.0


class Discoverer:
    """One host's."""

    def __init__(self, kernel: Kernel, worker: SerialWorker, clock: Clock, every_s: float = LOOK_S) -> None:
        self.labels: Cell[Labels] = Cell({})
        """What the node is to say; nothing before the first look."""
        self.seen: Discovery | None = None
        """What the last look has seen."""
        self._kernel = kernel
        self._worker = worker
        self._clock = clock
        self._every_s = every_s

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                seen = await self._worker.run(lambda: discovery.look(self._kernel), name="look", timeout_s=PATIENCE_S)
            except WorkerBlockedError as error:
                log.warning("%s; the labels stay as they are", error)
            else:
                self._take(seen)
            await self._clock.sleep(self._every_s)

    def _take(self, seen: Discovery) -> None:
        before, self.seen = self.seen, seen
        if before is None or before.unread != seen.unread:
            for one in seen.unread:
                log.warning("%s; what the node says of it stays as it is", unread_line(one))
        labels = labels_of(seen, before)
        if labels != self.labels.get():
            log.info("the node is to say: %s", ", ".join(f"{key}={value or '(not)'}" for key, value in labels.items()))
            self.labels.set(labels)


def unread_line(unread: Unread) -> str:
    """Return in words what could not be read."""
    return f"{unread.path} can't be read: {unread.said}"

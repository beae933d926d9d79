"""The view of the node in a file, for admins and programs on the host: `/run/gpuvirt/node.json`."""

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView

log = logging.getLogger(__name__)

FILE = "gpuvirt/node.json"
"""The path, relative to the host's `/run`."""

LIFE_S = 90.0
"""The age from which on a view has no running agent. A running agent renews it every 30 seconds."""


class StateFile:
    """The file with the agent's view."""

    def __init__(self, path: Path, clock: Clock, intervals: Intervals) -> None:
        self._path = path
        self._clock = clock
        self._intervals = intervals
        self._failed = False

    async def run(self, views: Cell[NodeView]) -> None:
        """Write each view, and the same one again as a sign of life, until cancelled; remove the file at the end."""
        changed = Signal()
        with views.notifying(changed):
            try:
                while True:
                    self._write(views.get())
                    pause_s = until_tick_s(self._clock.monotonic_s(), self._intervals.state_file_s)
                    await changed.wait_for(self._clock, pause_s)
            finally:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _write(self, view: NodeView) -> None:
        try:
            written = replace(view, at=self._clock.now(), at_s=self._clock.monotonic_s())
            content = msgspec.json.format(msgspec.json.encode(written), indent=1)
            replace_file(self._path, content, durable=False, mode=0o644)
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written, so commands on this host don't see the agent: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False


def read(path: Path, now_s: float, boot_id: str | None, procs: Iterable[Path]) -> NodeView | None:
    """Return the view of a running agent; None if there is no view, or none of this boot and of the last 90 seconds.

    `now_s` is by the host's monotonic clock, as the view's time of a boot: the wall clock may have stepped since.
    `procs` are the `/proc` folders in which a running agent is visible: a killed agent leaves its file behind.
    """
    try:
        view = from_json(path.read_bytes(), NodeView)
    except (OSError, DamagedError):
        return None
    is_late = view.at_s is not None and now_s - view.at_s > LIFE_S
    fresh = not is_late and view.boot_id == boot_id
    pid = view.agent.pid if view.agent is not None else None
    return view if fresh and any((proc / str(pid)).exists() for proc in procs) else None

"""Keeps the files of CDI specs as the view is: `/run/cdi/gpuvirt-*.json`."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers import cdi
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, nodeproblems

log = logging.getLogger(__name__)

FOLDER = "cdi"
"""The folder, relative to the host's `/run`."""


class CdiFiles:
    """gpuvirt's files in the folder of CDI specs, which other programs also use."""

    def __init__(self, folder: Path, clock: Clock, intervals: Intervals) -> None:
        self._folder = folder
        self._clock = clock
        self._intervals = intervals

    async def run(self, views: Cell[NodeView], observe: Callable[[Reason | None], None]) -> None:
        """Keep the files until cancelled. They stay: pods that start during an upgrade of gpuvirt need them."""
        changed = Signal()
        with views.notifying(changed):
            while True:
                if views.get().host_observed:
                    observe(self.write(views.get()))
                pause_s = until_tick_s(self._clock.monotonic_s(), self._intervals.state_file_s)
                await changed.wait_for(self._clock, pause_s)

    def write(self, view: NodeView) -> Reason | None:
        """Make the files as a view is, now; return why they can't be written."""
        return self._converge(cdi.specs(view))

    def _converge(self, desired: Mapping[str, bytes]) -> Reason | None:
        """Write and remove files until they are as desired. Equal files are not written, since runtimes watch them."""
        try:
            for name, content in desired.items():
                path = self._folder / name
                if _content(path) != content:
                    replace_file(path, content, durable=False, mode=0o644)
                    log.info("wrote the CDI spec %s, since the offered devices have changed", path)
            for path in self._folder.glob(f"{cdi.PREFIX}*.json"):
                if path.name not in desired:
                    path.unlink(missing_ok=True)
        except OSError as error:
            return nodeproblems.cdi_not_written(self._folder, str(error))
        return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None

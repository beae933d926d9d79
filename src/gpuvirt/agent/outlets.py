"""The files that follow the view of a node: markers for NVIDIA's operands, the state file, and CDI specs."""

import asyncio
from collections.abc import Callable
from functools import partial

from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.published.cdifiles import CdiFiles
from gpuvirt.agent.published.statefile import StateFile
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason


class Outlets:
    """The files of one agent that follow its views."""

    def __init__(
        self, options: NodeOptions, views: Cell[NodeView], report_problem: Callable[[str, Reason | None], None]
    ) -> None:
        self._options = options
        self._views = views
        self._report_specs = partial(report_problem, "cdi")
        folder = options.device_specs
        self._specs = CdiFiles(folder, options.clock, options.intervals) if folder is not None else None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the tasks that write the files which this agent has."""
        options, views = self._options, self._views
        if options.markers is not None:
            group.create_task(options.markers.run(views))
        if options.state_file is not None:
            group.create_task(StateFile(options.state_file, options.clock, options.intervals).run(views))
        if self._specs is not None:
            group.create_task(self._specs.run(views, self._report_specs))

    def write_specs(self) -> None:
        """Write the CDI specs of the present view now."""
        if self._specs is not None:
            self._report_specs(self._specs.write(self._views.get()))

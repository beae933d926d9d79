"""The files that follow the view of a node: markers for NVIDIA's operands, the state file, and CDI specs."""

import asyncio
from collections.abc import Callable
from functools import partial

from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.options import NodeOptions
from gpuvirt.node.published.cdifiles import CdiFiles
from gpuvirt.node.published.statefile import StateFile


def write_files(
    group: asyncio.TaskGroup,
    options: NodeOptions,
    views: Cell[NodeView],
    report_problem: Callable[[str, Reason | None], None],
) -> None:
    """Start the tasks that write the files which this agent has."""
    if options.markers is not None:
        group.create_task(options.markers.run(views))
    if options.state_file is not None:
        group.create_task(StateFile(options.state_file, options.clock, options.intervals).run(views))
    if options.device_specs is not None:
        specs = CdiFiles(options.device_specs, options.clock, options.intervals)
        group.create_task(specs.run(views, partial(report_problem, "cdi")))

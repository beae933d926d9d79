"""What the parts of an agent that change GPUs report to it: problems, ended changes, and progress."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuvirt.model.desired.observed import Progress
from gpuvirt.model.reasons import Reason
from gpuvirt.node.loops.cell import Cell

ReportProblem = Callable[[str, Reason | None], None]


@dataclass(frozen=True, slots=True)
class Reports:
    """Where the changes of one node's GPUs are reported."""

    changed: Callable[[tuple[str, ...], str], None]
    """Called when a change ends: with `passthrough`, `native` or `vgpus`, and the outcome."""
    decide_soon: Callable[[], None]
    """Called when something was learned from which decisions follow."""
    problem: ReportProblem
    """Called with a part of the agent and its problem, None when it has none any more."""
    vgpus: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """The progress of the desired vGPUs, as reported to the cluster; None: not reported."""
    workload: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """The progress of the desired drivers, as reported to the cluster; None: not reported."""

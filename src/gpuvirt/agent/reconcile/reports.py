"""The reports of an agent's parts: problems, ended changes, and the progress toward the desired state."""

from collections.abc import Callable

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.loops.wakes import Wakes
from gpuvirt.agent.published.problemlog import ProblemLog
from gpuvirt.facts.ids import ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import Progress
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import Reason


class Reports:
    """Takes the reports of one agent's parts."""

    def __init__(
        self, state: NodeState, wakes: Wakes, log: ProblemLog, telemetry: Telemetry, observe_soon: Callable[[str], None]
    ) -> None:
        """`observe_soon` has the host observed soon, for a reason that is counted."""
        self.vgpus: Cell[Progress | None] = Cell(None)
        """The progress of the desired vGPUs, as reported to the cluster; None: not reported."""
        self.workload: Cell[Progress | None] = Cell(None)
        """The progress of the desired drivers, as reported to the cluster; None: not reported."""
        self._state = state
        self._wakes = wakes
        self._log = log
        self._telemetry = telemetry
        self._observe_soon = observe_soon

    def problem(self, who: str, problem: Reason | None) -> None:
        """Record the problem of a part of the agent, None when it has none any more."""
        if self._state.note(who, problem):
            if problem is not None:
                self._log.add(problem)
            self._wakes.decide.set()

    def registration(self, resource: ResourceName, registration: Registration) -> None:
        """Record the state of a resource's registration with the kubelet."""
        if self._state.observe_registration(resource, registration):
            if registration.because is not None:
                self._log.add(registration.because)
            self._wakes.decide.set()

    def changed(self, kinds: tuple[str, ...], outcome: str) -> None:
        """Handle the end of a change of the kinds `passthrough`, `native` or `vgpus`."""
        for kind in kinds:
            self._telemetry.gpu_changes[kind, outcome] += 1
        self._observe_soon("change")
        self._wakes.room.set()
        self._wakes.decide.set()  # devices that the change has withheld may be offered again

    def decide_soon(self) -> None:
        """Call for new decisions."""
        self._wakes.decide.set()

"""The reports of an agent's parts: problems, ended changes, and the progress toward the desired state."""

import logging
from collections.abc import Callable

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.loops.wakes import Wakes
from gpuvirt.facts.ids import ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.observed import Progress
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import Reason, ReasonCode

log = logging.getLogger(__name__)


class ProblemLog:
    """Logs the problems of one node."""

    def __init__(self) -> None:
        self._invalid: tuple[InvalidDesired, ...] = ()
        """The invalid desired state that was logged."""
        self._review: Reason | None = None
        """The problem of the review of names that was logged."""

    def add(self, problem: Reason) -> None:
        """Log a new problem. Invalid desired state was logged with its origin."""
        if problem not in {invalid.reason for invalid in self._invalid}:
            _warn(problem)

    def follow(self, invalid: tuple[InvalidDesired, ...], review: Reason | None) -> None:
        """Log the difference to the invalid desired state before, and a new problem of the review of names."""
        for each in invalid:
            if each not in self._invalid:
                extra = {"reason": str(each.reason.code), "origin": str(each.origin)}
                log.warning("desired state: %s", each.reason.text, extra=extra)
        for each in self._invalid:
            if each not in invalid:
                log.info("desired state: no longer invalid: %s %s", each.where, each.reason.message)
        self._invalid = invalid
        if review is not None and review != self._review:
            _warn(review)
        self._review = review


def _warn(problem: Reason) -> None:
    """Log a problem; the admission of a pod, which takes a moment, is none yet."""
    level = logging.INFO if problem.code is ReasonCode.ADMISSION_UNSETTLED else logging.WARNING
    log.log(level, "%s", problem.text, extra={"reason": str(problem.code)})


class Reports:
    """Takes the reports of one agent's parts."""

    def __init__(
        self, state: NodeState, wakes: Wakes, log: ProblemLog, telemetry: Telemetry, observe_soon: Callable[[str], None]
    ) -> None:
        """`observe_soon` has the host observed soon, for a reason that is counted."""
        self.vgpus: Cell[Progress | None] = Cell(None)
        """The progress of the desired vGPUs, as reported to the cluster; None: unknown."""
        self.workload: Cell[Progress | None] = Cell(None)
        """The progress of the desired drivers, as reported to the cluster; None: unknown."""
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

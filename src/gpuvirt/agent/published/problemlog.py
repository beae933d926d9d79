"""The log of a node's problems: each once, and invalid desired state also when it is valid again."""

import logging

from gpuvirt.model.desired.invalid import InvalidDesired
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

"""The work that may be done for one question, counted in steps.

Anybody who may create pods can ask for units in many containers, and their arrangements on GPUs grow faster than any
number of tries. So the work is counted, and a question whose steps have run out stays undecided. A step takes about a
microsecond.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


class Steps:
    """The steps that are left for one question, or for several in turn."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.is_undecided = False
        """Whether the last answer is not certain: the pod may fit all the same."""

    def take(self, steps: int) -> None:
        """Count steps that are done; the last ones may be more than were left."""
        self.left -= steps

    def begin_answer(self) -> None:
        """Begin an answer, which is certain unless `leave_undecided` is called."""
        self.is_undecided = False

    def leave_undecided(self) -> None:
        """Note that the answer is not certain."""
        self.is_undecided = True


def finished(work: Generator[None, None, T]) -> T:
    """Return the result of work that yields wherever it may be interrupted, without an interruption."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result

"""`make explore-mutations`: removes each guard of `mutations` in turn, and explores until a schedule shows that."""

import argparse
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

from tests.explore.__main__ import describe, own_folder
from tests.explore.explorer import Explorer, Found
from tests.explore.guard import Guard
from tests.explore.known import is_known
from tests.explore.mutations import GUARDS
from tests.explore.observer import ViolationError
from tests.explore.scheduler import DeadlockError, EndlessError
from tests.explore.shrink import kind_of

MOST_DEPARTURES = 2
MOST_SCHEDULES = 8_000
"""How many schedules are run without a guard: a count and not a time, so that each computer runs the same ones."""


class BrokenMutationError(Exception):
    """The code can't run without the guard, so that the removal proves nothing."""


def find_missing(guard: Guard, folder: Path, stop: Callable[[], bool]) -> tuple[Found | None, int]:
    """Return the first schedule that shows that a guard is missing, and the number of schedules run.

    The caller has removed it. Raises BrokenMutationError where the code crashes without it.
    """
    explorers = [Explorer.of(name, folder) for name in guard.scenarios]
    for bound in range(1, MOST_DEPARTURES + 1):
        for explorer in explorers:
            for found in explorer.explore(bound, stop):
                if _shows(explorer, found):
                    return found, sum(explorer.tally.schedules for explorer in explorers)
    for explorer in explorers:
        for found in explorer.sample(Random(0), 1_000_000, stop):
            if _shows(explorer, found):
                return found, sum(explorer.tally.schedules for explorer in explorers)
    return None, sum(explorer.tally.schedules for explorer in explorers)


def _shows(explorer: Explorer, found: Found) -> bool:
    """Return whether a schedule is a new finding: it violates an invariant, or has no end."""
    if (
        not isinstance(found.failure, ViolationError | DeadlockError | EndlessError)
        or kind_of(found.failure) == "crash"
    ):
        raise BrokenMutationError(f"{found.seed}: {describe(found.failure)}") from found.failure
    return not is_known(explorer.name, kind_of(found.failure))


def after(schedules: int) -> Callable[[], bool]:
    """Return a function that returns True from this number of calls on: explorers ask it before each schedule."""
    number = count()
    return lambda: next(number) >= schedules


def main() -> int:
    """Run the command line; return 1 if a removal is not detected."""
    parser = argparse.ArgumentParser(prog="explore.removal")
    parser.add_argument("--schedules", type=int, default=MOST_SCHEDULES, help="for each guard, at most")
    parser.add_argument("words", nargs="*", help="only guards whose name has one of these in it")
    options = parser.parse_args()
    worst = 0
    with own_folder() as folder:
        for name, guard in GUARDS.items():
            if options.words and not any(word in name for word in options.words):
                continue
            try:
                with guard.removed():
                    found, schedules = find_missing(guard, folder, after(options.schedules))
            except BrokenMutationError as error:
                worst = 1
                print(f"BROKEN       {name}: {error}", flush=True)
                continue
            if found is None:
                worst = 1
                print(f"NOT NOTICED  {name}: {schedules} schedules", flush=True)
            else:
                print(f"noticed      {name}: after {schedules} schedules: {found.seed}", flush=True)
                print(f"             {describe(found.failure)[:200]}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())

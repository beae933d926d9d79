"""How much a test does: all examples of a property, or a third where a user waits; and big runs at their full size.

`make test` runs a third of the examples. `make test-full-size` runs the tests that CI runs with fewer pods: at full
size they take about an hour, more than all others. CI notices what fails in any run, the full size what fails once in
hundreds.
"""

import os

QUICK = "GPUVIRT_QUICK_TESTS"
FULL_SIZE = "GPUVIRT_FULL_SIZE_TESTS"


def examples(most: int) -> int:
    """Return the number of examples, of at most `most`."""
    return -(-most // 3) if is_quick() else most


def is_quick() -> bool:
    """Whether a user waits, or CI, which has time for a part of all."""
    return bool(os.environ.get(QUICK))  # noqa: TID251  a switch of the tests alone


def sized(full: int, in_ci: int) -> int:
    """Return how large a run is: `full` where a person asks for that, else what CI has time for."""
    return full if os.environ.get(FULL_SIZE) else in_ci  # noqa: TID251  a switch of the tests alone

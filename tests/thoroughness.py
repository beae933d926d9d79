"""How many examples a property is tried on: all, or a third of them where a person waits (`make test-unit`)."""

import os

QUICK = "GPUVIRT_QUICK_TESTS"


def examples(most: int) -> int:
    """Return how many of at most so many are to be tried."""
    return -(-most // 3) if os.environ.get(QUICK) else most  # noqa: TID251  a switch of the tests alone

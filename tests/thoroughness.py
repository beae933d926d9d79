"""How many examples a property is tested with: all, or a third where a user waits (`make test-unit`)."""

import os

QUICK = "GPUVIRT_QUICK_TESTS"


def examples(most: int) -> int:
    """Return the number of examples, of at most `most`."""
    return -(-most // 3) if os.environ.get(QUICK) else most  # noqa: TID251  a switch of the tests alone

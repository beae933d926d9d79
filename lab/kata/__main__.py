"""`python -m lab.kata` builds the witness of Kata's cold plug, and prints its path."""

import sys

from lab.cluster.golang import BuildError
from lab.kata.witness import witness


def main() -> int:
    """Build it."""
    try:
        print(witness())
    except BuildError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m lab.dra` builds Kubernetes' allocator of claims, and prints its path."""

import sys

from lab.cluster.golang import BuildError
from lab.dra.allocator import program


def main() -> int:
    """Build it."""
    try:
        print(program())
    except BuildError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

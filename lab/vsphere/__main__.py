"""`python -m lab.vsphere` builds the simulated vCenter."""

import sys

from lab.cluster.golang import BuildError
from lab.vsphere.simulator import program


def main() -> int:
    """Print the program's path."""
    try:
        print(program())
    except BuildError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

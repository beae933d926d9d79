"""`python -m lab.dra` builds Kubernetes' allocator of claims, and prints its path."""

import sys

from lab.cluster.golang import print_built
from lab.dra.allocator import program

if __name__ == "__main__":
    sys.exit(print_built(program))

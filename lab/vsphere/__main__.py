"""`python -m lab.vsphere` builds the simulated vCenter, and prints its path."""

import sys

from lab.cluster.golang import print_built
from lab.vsphere.simulator import program

if __name__ == "__main__":
    sys.exit(print_built(program))

"""`python -m lab.kata` builds the witness of Kata's cold plug, and prints its path."""

import sys

from lab.cluster.golang import print_built
from lab.kata.witness import witness

if __name__ == "__main__":
    sys.exit(print_built(witness))

"""Explores transitions of VgpuSchedules from a seed on: `python -m tests.schedules --first 100 --count 20`."""

import argparse
import logging
import sys

from tests.schedules.explore import Make, explored
from tests.schedules.lagworld import LagWorld
from tests.schedules.profileworld import ProfileWorld
from tests.schedules.vmworld import VmWorld
from tests.schedules.world import World

WORLDS: tuple[Make, ...] = (World, ProfileWorld, VmWorld, LagWorld)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds, with three transitions each")
    options = parser.parse_args()
    logging.disable()  # each fault that a run survives is a line
    seeds = range(options.first, options.first + options.count)
    found = [violation for world in WORLDS if (violation := explored(seeds, world)) is not None]
    for seed, story in found:
        print(f"seed {seed}:\n{story}\n  again: python -m tests.schedules --first {seed} --count 1")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

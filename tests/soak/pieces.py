"""The pieces of a soak: property tests, schedules of agents, transitions; each command names its new seed."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
EXPLORING_S = 60
"""How long schedules of agents are explored in a row."""
TRANSITIONS = 20
"""How many runs of transitions, three each, are one piece."""
MOST = 2**31
BATCH = 4
"""How many files of property tests come between two explorations."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A command whose repetition does the same."""

    command: tuple[str, ...]

    @property
    def line(self) -> str:
        """The line that repeats it, for a shell in the repository."""
        return " ".join((".venv/bin/python", *self.command[1:]))


def property_files(listed: str) -> tuple[str, ...]:
    """Return the files of a list of tests, as `pytest --collect-only -q` prints it."""
    return tuple(dict.fromkeys(line.partition("::")[0] for line in listed.splitlines() if "::" in line))


def found_files() -> tuple[str, ...]:
    """Return the files with property tests; raise RuntimeError if pytest can't collect them."""
    command = (*PYTEST, "--collect-only", "-m", "hypothesis and not ring", "tests")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pytest could not collect the tests:\n{done.stdout}{done.stderr}")
    return property_files(done.stdout)


def pieces(files: Sequence[str], random: Random) -> Iterator[Piece]:
    """Yield pieces without end: each file of property tests in turn, with explorations between them."""
    shuffled = cycle(random.sample(files, len(files)))
    while True:
        for file in islice(shuffled, BATCH):
            yield _properties(file, random.randrange(MOST))
        yield _schedules(random.randrange(MOST))
        yield _transitions(random.randrange(MOST))


def _properties(file: str, seed: int) -> Piece:
    seeds = (f"--hypothesis-seed={seed}", "-p", "randomly", f"--randomly-seed={seed}")
    return Piece((*PYTEST, file, "-m", "hypothesis and not ring", *seeds))


def _schedules(first: int) -> Piece:
    seconds = ("--seconds", str(EXPLORING_S))
    return Piece((sys.executable, "-m", "tests.explore", *seconds, "--first", str(first), "random"))


def _transitions(first: int) -> Piece:
    return Piece((sys.executable, "-m", "tests.schedules", "--first", str(first), "--count", str(TRANSITIONS)))

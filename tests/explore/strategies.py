"""Strategies: how the choices of a schedule are made, and recorded so that the schedule can be run again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol


class Strategy(Protocol):
    """Makes the choices of one schedule. Choice 0 is always the default: the running strand continues."""

    def choose(self, count: int, /) -> int:
        """Return which of `count` options is taken."""
        ...


@dataclass
class Scripted:
    """Departs from the default only at the given steps, and records the number of options of each step."""

    departures: Mapping[int, int]
    counts: list[int] = field(default_factory=list)

    def choose(self, count: int, /) -> int:
        """Return the recorded option of this step, else the default."""
        step = len(self.counts)
        self.counts.append(count)
        desired = self.departures.get(step, 0)
        return desired if desired < count else 0


RATES = (0.02, 0.05, 0.15, 0.4)


@dataclass
class Uniform:
    """Departs from the default at random steps, and records each departure."""

    random: Random
    rate: float
    """The probability that a step departs from the default."""
    departures: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def drawn(cls, random: Random) -> "Uniform":
        """Return the strategy of one random schedule."""
        return cls(random, random.choice(RATES))

    def choose(self, count: int, /) -> int:
        """Return an option at random."""
        step = self.steps
        self.steps += 1
        if count < 2 or self.random.random() >= self.rate:
            return 0
        chosen = self.departures[step] = self.random.randrange(1, count)
        return chosen

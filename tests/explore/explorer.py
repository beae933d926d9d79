"""Explores a scenario: all schedules with a limited number of departures from the default, then random schedules."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from msgspec.structs import replace

from tests.explore.randomly import scenario_of
from tests.explore.reduction import redundant
from tests.explore.run import Outcome, run
from tests.explore.scenario import Scenario
from tests.explore.scenarios import SCENARIOS
from tests.explore.seeds import RANDOM, WHOLE, Seed
from tests.explore.strategies import Scripted, Uniform

Departures = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Node:
    """A schedule that was run, and from which further schedules depart."""

    chosen: Departures
    counts: "array[int]"
    """The number of options of each step."""
    redundant: frozenset[tuple[int, int]]
    """The departures with the same execution as a later departure."""


@dataclass(frozen=True)
class Found:
    """A schedule that violates an invariant."""

    seed: Seed
    failure: BaseException


@dataclass
class Tally:
    """Counts of the explored schedules."""

    schedules: int = 0
    operations: int = 0
    """The number of checked destructive operations."""
    redundant: int = 0
    """The number of schedules that were omitted, since another has the same execution."""
    complete: int = -1
    """The number of departures up to which all schedules were run."""

    def add(self, outcome: Outcome) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.operations += outcome.operations


@dataclass
class Explorer:
    """Explores one scenario."""

    name: str
    scenario: Scenario
    folder: Path
    tally: Tally = field(default_factory=Tally)
    spread: Random | None = None
    """Shuffles the schedules with the same number of departures, for a run of only a part of them."""
    reduces: bool = True
    """Whether schedules with the same execution as others are omitted."""

    @classmethod
    def of(cls, name: str, folder: Path) -> "Explorer":
        """Return the explorer of a scenario by its name: `random-` and a number for a random scenario."""
        plain = name.removesuffix(WHOLE)
        scenario = scenario_of(_number(name)) if name.startswith(RANDOM) else SCENARIOS[plain]
        return cls(name, replace(scenario, whole=True) if name != plain else scenario, folder)

    def try_seed(self, seed: Seed, *, traced: bool = False) -> Outcome:
        """Run the schedule of a seed."""
        strategy = Uniform.drawn(Random(_number(self.name))) if seed.is_drawn else Scripted(dict(seed.departures))
        return run(seed.of(self.scenario), strategy, self.folder, traced=traced)

    def explore(self, bound: int, stop: Callable[[], bool]) -> Iterator[Found]:
        """Yield the schedules with at most `bound` departures that violate an invariant, the fewest departures first.

        `stop` ends the exploration early; `tally.complete` has the completed number of departures.
        """
        level: list[_Node] = []
        for departures in range(bound + 1):
            following: list[_Node] = []
            for chosen, is_redundant in self._in_order(level) if departures else iter([((), False)]):
                if stop():
                    return
                if is_redundant and departures == bound:
                    self.tally.redundant += 1
                    continue
                strategy = Scripted(dict(chosen))
                outcome = run(self.scenario, strategy, self.folder)
                self.tally.add(outcome)
                if outcome.failure is not None:
                    yield Found(Seed(self.name, dict(chosen)), outcome.failure)
                elif departures < bound:
                    following.append(self._node(chosen, strategy.counts, outcome, is_redundant=is_redundant))
            level, self.tally.complete = following, departures

    def _node(self, chosen: Departures, counts: Sequence[int], outcome: Outcome, *, is_redundant: bool) -> _Node:
        """Return the node of a schedule; only immediate departures follow a redundant schedule."""
        steps = counts[: chosen[-1][0] + 2] if is_redundant else counts
        found = frozenset(redundant(outcome.choices)) if self.reduces else frozenset()
        return _Node(chosen, array("B", (min(step, 255) for step in steps)), found)

    def _in_order(self, level: "list[_Node]") -> "Iterator[tuple[Departures, bool]]":
        if self.spread is None:
            return _children(level)
        found = list(_children(level))
        self.spread.shuffle(found)
        return iter(found)

    def sample(self, random: Random, most: int, stop: Callable[[], bool]) -> Iterator[Found]:
        """Run `most` random schedules; yield each that violates an invariant."""
        for _ in range(most):
            if stop():
                return
            strategy = Uniform.drawn(random)
            outcome = run(self.scenario, strategy, self.folder)
            self.tally.add(outcome)
            if outcome.failure is not None:
                yield Found(Seed(self.name, strategy.departures), outcome.failure)


def _children(level: list[_Node]) -> Iterator[tuple[Departures, bool]]:
    """Yield the schedules with one more departure, after the last departure of their parents.

    Each comes with whether its execution equals that of another schedule.
    """
    for node in level:
        first = node.chosen[-1][0] + 1 if node.chosen else 0
        for step in range(first, len(node.counts)):
            for option in range(1, node.counts[step]):
                yield (*node.chosen, (step, option)), (step, option) in node.redundant


def _number(name: str) -> int:
    return int(name.removeprefix(RANDOM).removesuffix(WHOLE))


def sample_random(
    numbers: range, folder: Path, tally: Tally, stop: Callable[[], bool], level: str = ""
) -> Iterator[Found]:
    """Run the random schedules of the random scenarios with these numbers; yield each that violates an invariant.

    `level` is `WHOLE` to run all of them at the whole level.
    """
    for number in numbers:
        if stop():
            return
        explorer = Explorer.of(f"{RANDOM}{number}{level}", folder)
        yield from explorer.sample(Random(number), 1, stop)
        tally.schedules += explorer.tally.schedules
        tally.operations += explorer.tally.operations

"""`make explore`: explores for a number of seconds, or runs one schedule again and prints its story."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import monotonic  # noqa: TID251  how long a person lets it explore

import msgspec
from msgspec.structs import replace

from tests.explore.explorer import Explorer, Found, Tally, sample_random
from tests.explore.known import is_known
from tests.explore.scenarios import SCENARIOS
from tests.explore.seeds import WHOLE, parse
from tests.explore.shrink import kind_of, shrink

ALL_RANDOM = "random"
"""The name that stands for all random scenarios."""
MOST_RANDOM = 1_000_000
MEMORY = Path("/dev/shm")  # noqa: S108  files there are synced at no cost


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a folder for the files of schedules, in memory where possible."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def replay(text: str) -> int:
    """Run one schedule again, and print its story."""
    seed = parse(text)
    with own_folder() as folder:
        outcome = Explorer.of(seed.name, folder).try_seed(seed, traced=True)
    print("\n".join(outcome.story))
    print(f"\n{text}: {describe(outcome.failure)}" if outcome.failure is not None else f"\n{text}: nothing is wrong")
    return 0 if outcome.failure is None else 1


def describe(failure: BaseException) -> str:
    """Return the text of a failure."""
    if isinstance(failure, BaseExceptionGroup):
        return f"{failure}: {'; '.join(describe(each) for each in failure.exceptions)}"
    return f"{type(failure).__name__}: {failure}"


class Extent(msgspec.Struct, frozen=True):
    """The limits of an exploration."""

    seconds: float
    bound: int
    """The number of departures up to which all schedules of a scenario are run."""
    only_bounded: bool
    """Whether to run no random schedules."""
    numbers: range
    """The numbers of the random scenarios."""


def explore(extent: Extent, names: list[str]) -> int:
    """Explore scenarios in turn, each to a bound and then at random, and random ones; return 1 for a new finding."""
    end_s = monotonic() + extent.seconds
    worst = 0
    with own_folder() as folder:
        for number, name in enumerate(names):
            began_s = monotonic()
            share_s = began_s + (end_s - began_s) / (len(names) - number)
            tally, found = _explore_one(name, extent, folder, partial(_is_over, share_s))
            worst = max(worst, found)
            rate = tally.schedules / (monotonic() - began_s)
            complete = f", all with at most {tally.complete} departures" if tally.complete >= 0 else ""
            left_out = f"; {tally.redundant} left out as equal to others" if tally.redundant else ""
            judged = f"{tally.operations} destructive operations judged"
            print(f"{name}: {tally.schedules} schedules, {rate:.0f} a second{complete}{left_out}; {judged}", flush=True)
    return worst


def explore_by(jobs: int, extent: Extent, names: list[str]) -> int:
    """Explore in several processes: each has a share of the scenarios and of the numbers of random scenarios."""
    if jobs == 1:
        return explore(extent, names)
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return max(pool.map(partial(_explore_share, extent, names, jobs), range(jobs)))


def _explore_share(extent: Extent, names: list[str], jobs: int, job: int) -> int:
    named = [name for name in names if not _is_all_random(name)]
    share = [*named[job::jobs], *(name for name in names if _is_all_random(name))]
    return explore(replace(extent, numbers=extent.numbers[job::jobs]), share)


def _is_all_random(name: str) -> bool:
    return name.removesuffix(WHOLE) == ALL_RANDOM


def _is_over(end_s: float) -> bool:
    return monotonic() > end_s


def _explore_one(name: str, extent: Extent, folder: Path, stop: Callable[[], bool]) -> tuple[Tally, int]:
    """Explore one scenario, or all random scenarios; return the tally, and 1 for a new finding."""
    tally, worst = Tally(), 0
    kinds: set[str] = set()
    if is_random := _is_all_random(name):
        search = sample_random(extent.numbers, folder, tally, stop, name.removeprefix(ALL_RANDOM))
    else:
        explorer = Explorer.of(name, folder)
        tally, search = explorer.tally, _search(explorer, extent, stop)
    for found in search:
        kind = kind_of(found.failure)
        if kind in kinds and not is_random:
            continue
        kinds.add(kind)
        known = is_known(found.seed.name, kind)
        small = found if known else shrink(Explorer.of(found.seed.name, folder), found)
        again = f"make explore SEED='{small.seed}'"
        print(f"\n{'known: ' if known else ''}{describe(small.failure)}\n  again: {again}\n", flush=True)
        worst = worst if known else 1
    return tally, worst


def _search(explorer: Explorer, extent: Extent, stop: Callable[[], bool]) -> Iterator[Found]:
    yield from explorer.explore(extent.bound, stop)
    if not extent.only_bounded:
        yield from explorer.sample(Random(0), MOST_RANDOM, stop)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="explore")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bound", type=int, default=3, help="departures from the default schedule")
    parser.add_argument("--only-bounded", action="store_true", help="run no random schedules of named scenarios")
    parser.add_argument("--first", type=int, default=0, help="number of the first random scenario")
    parser.add_argument("--count", type=int, default=MOST_RANDOM, help="of random scenarios, at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--seed", help="one schedule to run again")
    parser.add_argument("names", nargs="*", help="scenarios (all, if none is named), `random`, `NAME+whole`")
    options = parser.parse_args()
    if options.seed:
        return replay(options.seed)
    numbers = range(options.first, options.first + options.count)
    extent = Extent(options.seconds, options.bound, options.only_bounded, numbers)
    return explore_by(options.jobs, extent, options.names or [*SCENARIOS, ALL_RANDOM])


if __name__ == "__main__":
    sys.exit(main())

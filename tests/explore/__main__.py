"""`python -m explore`: explores for so many seconds, or runs one schedule again and tells its story."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import monotonic  # noqa: TID251  how long a person lets it explore

from explore.explorer import Explorer, Found
from explore.scenarios import SCENARIOS
from explore.seeds import parse
from explore.shrink import kind_of, shrink

MEMORY = Path("/dev/shm")  # noqa: S108  files there are synced at no cost


@contextmanager
def own_folder() -> Iterator[Path]:
    """Give a folder for the files of schedules, in memory where that can be."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def again(text: str) -> int:
    """Run one schedule again, and tell its story."""
    seed = parse(text)
    with own_folder() as folder:
        outcome = Explorer(seed.name, SCENARIOS[seed.name], folder).try_seed(seed, told=True)
    print("\n".join(outcome.story))
    print(f"\n{text}: {tell(outcome.failure)}" if outcome.failure is not None else f"\n{text}: nothing is wrong")
    return 0 if outcome.failure is None else 1


def tell(failure: BaseException) -> str:
    """Return a failure in words."""
    if isinstance(failure, BaseExceptionGroup):
        return f"{failure}: {'; '.join(tell(one) for one in failure.exceptions)}"
    return f"{type(failure).__name__}: {failure}"


def explore(seconds: float, bound: int, names: list[str]) -> int:
    """Explore scenarios by turns, each to a bound and then at random; return 1 where something was found."""
    end_s = monotonic() + seconds
    worst = 0
    with own_folder() as folder:
        for number, name in enumerate(names):
            explorer = Explorer(name, SCENARIOS[name], folder)
            began_s = monotonic()
            share_s = began_s + (end_s - began_s) / (len(names) - number)
            kinds: set[str] = set()

            def stop(share_s: float = share_s) -> bool:
                return monotonic() > share_s

            for found in _search(explorer, bound, stop):
                if kind_of(found.failure) not in kinds:
                    kinds.add(kind_of(found.failure))
                    _show(shrink(explorer, found))
                    worst = 1
            took_s, tally = monotonic() - began_s, explorer.tally
            print(
                f"{name}: {tally.schedules} schedules, {tally.schedules / took_s:.0f} a second,"
                f" all with at most {tally.complete} departures; {tally.operations} destructive operations judged",
                flush=True,
            )
    return worst


def _search(explorer: Explorer, bound: int, stop: Callable[[], bool]) -> Iterator[Found]:
    yield from explorer.explore(bound, stop)
    yield from explorer.sample(Random(0), 1_000_000, stop)


def _show(found: Found) -> None:
    print(f"\n{tell(found.failure)}\n  again: make explore SEED='{found.seed}'\n", flush=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="explore")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bound", type=int, default=3, help="departures from the default schedule")
    parser.add_argument("--seed", help="one schedule to run again")
    parser.add_argument("names", nargs="*", help="scenarios; all, if none is named")
    options = parser.parse_args()
    if options.seed:
        return again(options.seed)
    return explore(options.seconds, options.bound, options.names or list(SCENARIOS))


if __name__ == "__main__":
    sys.exit(main())

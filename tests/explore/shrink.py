"""Shrinks a failing schedule: removes actions, then departures, as long as it still fails in the same way."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from tests.explore.explorer import Explorer, Found
from tests.explore.observer import ViolationError
from tests.explore.seeds import Seed


def kind_of(failure: BaseException) -> str:
    """Return the kind of a failure: two schedules with the same kind are the same finding."""
    return failure.kind if isinstance(failure, ViolationError) else type(failure).__name__


def shrink(explorer: Explorer, found: Found, most: int = 600) -> Found:
    """Return the smallest schedule that still fails in the same way, after at most `most` runs."""
    tries = 0

    def fails(seed: Seed) -> Found | None:
        nonlocal tries
        tries += 1
        outcome = explorer.try_seed(seed)
        if outcome.failure is None or kind_of(outcome.failure) != kind_of(found.failure):
            return None
        return Found(seed, outcome.failure)

    smallest = found
    while tries < most and (smaller := _first(_smaller(explorer, smallest.seed), fails, lambda: tries < most)):
        smallest = smaller
    return smallest


def _first(seeds: Iterator[Seed], fails: Callable[[Seed], Found | None], may_go_on: Callable[[], bool]) -> Found | None:
    return next((found for seed in seeds if may_go_on() and (found := fails(seed)) is not None), None)


def _smaller(explorer: Explorer, seed: Seed) -> Iterator[Seed]:
    """Yield slightly smaller schedules, the smallest first."""
    steps = sorted(seed.departures)
    for size in (len(steps), len(steps) // 2, len(steps) // 4):
        if size > 1:
            for begin in range(0, len(steps), size):
                kept = [step for number, step in enumerate(steps) if not begin <= number < begin + size]
                yield replace(seed, departures={step: seed.departures[step] for step in kept})
    for step in reversed(steps):
        yield replace(
            seed, departures={departure: option for departure, option in seed.departures.items() if departure != step}
        )
    for actor, actions in enumerate(explorer.scenario.actors):
        for action in reversed(range(len(actions))):
            if (actor, action) not in seed.left_out:
                yield replace(seed, left_out=seed.left_out | {(actor, action)})
    for step in steps:
        if (option := seed.departures[step]) > 1:
            yield replace(seed, departures={**seed.departures, step: option - 1})

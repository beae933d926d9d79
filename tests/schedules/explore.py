"""Explores worlds: a run is a seed; one that violates an invariant is shrunk, and shown with its last steps."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from tests.schedules.choices import Choices, shrunk
from tests.schedules.world import ViolationError, World

SWITCHES = 3
ROUNDS = 150


Make = Callable[[Choices], World]
"""Makes the world of a run."""


async def play(choices: Choices, make: Make = World) -> World:
    """Play one run, and return its world; raises ViolationError."""
    world = make(choices)
    for _ in range(SWITCHES):
        world.to_next_switch()
        for _ in range(ROUNDS):
            if await world.one_round() is None:
                break
    await world.settle()
    world.judge_end()
    return world


def violation(seed: int, replayed: Sequence[int] | None = None, make: Make = World) -> str | None:
    """Return what a run violates; None if nothing."""
    try:
        asyncio.run(play(Choices(seed, replayed), make))
    except ViolationError as error:
        return str(error)
    return None


def _fails(kind: str, make: Make, made: Sequence[int]) -> bool:
    return kind in (violation(0, made, make) or "")


def explored(seeds: Sequence[int], make: Make = World) -> tuple[int, str] | None:
    """Return the first seed with a violation, and its shrunk run's last steps; None if there is none."""
    for seed in seeds:
        choices = Choices(seed)
        try:
            asyncio.run(play(choices, make))
        except ViolationError as error:
            kind = str(error).splitlines()[-1].partition(":")[0]
            smallest = shrunk(choices.made, partial(_fails, kind, make))
            return seed, violation(0, smallest, make) or str(error)
    return None

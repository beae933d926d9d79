"""Explores worlds: a run is a seed; one that violates an invariant is shrunk, and shown with its last steps."""

import asyncio
from collections.abc import Sequence
from functools import partial

from tests.schedules.choices import Choices, shrunk
from tests.schedules.world import ViolationError, World

SWITCHES = 3
ROUNDS = 150


async def play(choices: Choices) -> World:
    """Play one run, and return its world; raises ViolationError."""
    world = World(choices)
    for _ in range(SWITCHES):
        world.to_next_switch()
        for _ in range(ROUNDS):
            if await world.one_round() is None:
                break
    await world.settle()
    world.judge_end()
    return world


def violation(seed: int, replayed: Sequence[int] | None = None) -> str | None:
    """Return what a run violates; None if nothing."""
    try:
        asyncio.run(play(Choices(seed, replayed)))
    except ViolationError as error:
        return str(error)
    return None


def _fails(kind: str, made: Sequence[int]) -> bool:
    return kind in (violation(0, made) or "")


def explored(seeds: Sequence[int]) -> tuple[int, str] | None:
    """Return the first seed with a violation, and its shrunk run's last steps; None if there is none."""
    for seed in seeds:
        choices = Choices(seed)
        try:
            asyncio.run(play(choices))
        except ViolationError as error:
            kind = str(error).splitlines()[-1].partition(":")[0]
            smallest = shrunk(choices.made, partial(_fails, kind))
            return seed, violation(0, smallest) or str(error)
    return None

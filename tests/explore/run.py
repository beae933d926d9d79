"""Runs one schedule: starts the world, runs the actors, waits until the world is at rest, and checks it."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from tests.explore.observer import ViolationError
from tests.explore.reduction import Choice
from tests.explore.rest import find_fault
from tests.explore.scenario import Scenario
from tests.explore.scheduler import Scheduler
from tests.explore.seams import explored
from tests.explore.strategies import Strategy
from tests.explore.surroundings import WorldSurroundings
from tests.explore.world import World

BEGIN_S = 3.0
COLLECT_EVERY = 40
RESTS_S = (45.0, 400.0)
"""How long a world rests: a little longer than periodic work, and if that is not enough, past all pauses."""


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule."""

    failure: BaseException | None
    story: tuple[str, ...]
    operations: int
    """The number of checked destructive operations."""
    choices: Sequence[Choice]
    """The steps of the exploration."""


class _Errors(logging.Handler):
    """Treats a logged error of the agent as a failure: its supervision has restarted a task."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(logging.ERROR)
        self._scheduler = scheduler

    @override
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._scheduler.fail(error or ViolationError("crash", record.getMessage()))

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle only error records for as long as the context lasts; other records are not formatted."""
        root = logging.getLogger()
        level = root.level
        root.addHandler(self)
        root.setLevel(logging.ERROR)
        try:
            yield
        finally:
            root.setLevel(level)
            root.removeHandler(self)


def run(scenario: Scenario, strategy: Strategy, folder: Path, *, traced: bool = False) -> Outcome:
    """Run one schedule; a failure is returned, not raised."""
    failure: BaseException | None = None
    _collect_now_and_then()
    world = World(scenario, strategy, folder, traced=traced)
    with explored(WorldSurroundings(world)), _Errors(world.scheduler).handling():
        try:
            world.open()
            _play(world)
        except Exception as error:  # noqa: BLE001  it is the result of the schedule
            failure = error
        finally:
            world.close()
    scheduler = world.scheduler
    return Outcome(failure, tuple(scheduler.story or ()), world.observer.operations, scheduler.choices)


def _collect_now_and_then() -> None:
    """Collect garbage only between schedules, and not after each: that halves the time of a schedule.

    Objects that the first schedule has loaded are frozen, so that later collections skip them.
    """
    gc.disable()
    _Collected.runs += 1
    if _Collected.runs == 2:
        gc.collect()
        gc.freeze()
    elif _Collected.runs % COLLECT_EVERY == 0:
        gc.collect()


class _Collected:
    runs = 0


def _play(world: World) -> None:
    scheduler = world.scheduler
    world.horizon_s = BEGIN_S
    scheduler.run()
    for action in world.scenario.first:
        action.act(world)
        world.horizon_s += BEGIN_S
        scheduler.run()
    world.horizon_s = max(world.horizon_s, world.scenario.begin_s)
    scheduler.run()
    find_fault(world)
    scheduler.exploring = True
    world.look_ahead()
    scheduler.run()
    scheduler.exploring = False
    scheduler.agenda.release_all()
    world.patience_s = 0.0
    world.is_at_rest = True
    scheduler.add_line("--- at rest")
    wrong: ViolationError | None = None
    for rest_s in RESTS_S:
        world.horizon_s = world.clock.monotonic_s() + rest_s
        scheduler.run()
        if (wrong := find_fault(world)) is None:
            return
    raise wrong or AssertionError

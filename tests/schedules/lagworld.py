"""A world in which the wall clock of a controller may be behind, as that of a VM that was paused."""

from collections.abc import Sequence

from typing_extensions import override

from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.status import ScheduleStatus
from gpuvirt_schedules.controller.rounds import StoredSchedule
from gpuvirt_schedules.decide.transition import Advance
from tests.schedules.choices import Choices
from tests.schedules.world import ModelApi, Term, World, WorldClock

LAGS_S = (0.0, 600.0, 3000.0)


class LagWorld(World):
    """Clocks of later controllers may lag until the world is calm."""

    def __init__(self, choices: Choices) -> None:
        self.clocks: list[WorldClock] = []
        super().__init__(choices)

    @override
    def new_clock(self) -> WorldClock:
        """Return the clock of a controller; that of the first one is right."""
        lag_s = LAGS_S[self.choices.pick([2, 1, 1])] if self.clocks and not self.is_calm else 0.0
        if lag_s:
            self.note(f"the next controller's clock is {lag_s:g} s behind")
        clock = WorldClock(self, lag_s)
        self.clocks.append(clock)
        return clock

    @override
    def new_api(self, term: Sequence[Term]) -> ModelApi:
        """Return the API server, which judges what is recorded."""
        return JudgingApi(self, term)

    @override
    async def settle(self) -> None:
        """Set all clocks, and let everything work."""
        for clock in self.clocks:
            clock.lag_s = 0.0
        await super().settle()


class JudgingApi(ModelApi):
    """The API server, to which no controller may report an earlier switch of the same spec than the last one."""

    @override
    async def record(
        self, stored: StoredSchedule, status: ScheduleStatus, problems: tuple[Reason, ...], advance: Advance
    ) -> None:
        """Judge the status, and write it."""
        last, before = status.last_switch, stored.status.last_switch
        is_same = status.generation == stored.status.generation == stored.schedule.generation
        if is_same and last is not None and before is not None and last < before:
            self._world.violate(f"the switch of {before} is undone: {status.transition}")
        await super().record(stored, status, problems, advance)

"""Outages of the controller in the midst of a switch: the next one begins each step's time with its own rounds."""

from collections import Counter
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.observed import VmStep
from gpuvirt.model.workers.spec import Drain, Leave, OnTimeout
from gpuvirt.model.workers.status import Outcome, SwitchCause, WorkerStep
from gpuvirt_schedules.decide.times import timeline_of
from tests.schedules.choices import Choices
from tests.schedules.modelhypervisor import Fault
from tests.schedules.vmworld import VmWorld
from tests.schedules.world import DAY, MINE, NIGHT, DiedError, Term, World

TIMEOUT_S = 120.0
OUTAGE_S = 4000.0
"""Longer than each deadline."""
FORCED = Drain(TIMEOUT_S, OnTimeout.FORCE)


class OutageWorld(World):
    """A world in which nothing fails but one controller, before a request; the next one comes much later."""

    def __init__(self, dies_at: str, leave: Leave = Leave.SUSPEND) -> None:
        self.dies_at = dies_at
        self.was_held = False
        self.wall_s = 0.0
        """How far the wall clock was set forward."""
        super().__init__(Choices(0, ()))
        self.schedule = replace(self.schedule, drain=FORCED, leave=leave)
        self.is_calm = True

    @property
    @override
    def now(self) -> datetime:
        """The wall-clock time."""
        return super().now + timedelta(seconds=self.wall_s)

    @override
    async def point(self, what: str, term: Term) -> Fault:
        """A request: the first of one kind ends the controller."""
        if self.dies_at and what.startswith(self.dies_at):
            self.dies_at = ""
            raise DiedError
        return await super().point(what, term)

    @override
    async def one_round(self) -> float | None:
        """Make a round; once the controller has died, the outage follows."""
        was_up = bool(self.dies_at)
        pause_s = await super().one_round()
        self.was_held |= bool(self.status.held) or any(vm.is_held for vm in self.status.vms)
        if was_up and not self.dies_at:
            self.pass_time(OUTAGE_S)
            self.log.clear()
        return pause_s

    async def until_reached(self) -> None:
        """Make rounds until no switch is under way."""
        for _ in range(2000):
            if await self.one_round() is None:
                return
        raise AssertionError(f"{self.status.transition} in {self.log[-20:]}")

    def lead_again(self, wall_s: float) -> None:
        """Let another controller lead, whose wall clock differs."""
        self.end_term(self.term)
        self.pass_time(30.0)
        self.term, self.wall_s = self._new_term(), wall_s
        self.log.clear()

    async def until(self, what: str) -> float:
        """Make rounds until a request was made, and return when."""
        for _ in range(2000):
            if any(what in line for line in self.log):
                return self.now_s
            await self.one_round()
        raise AssertionError(f"no {what!r} in {self.log[-20:]}")

    def done(self) -> list[str]:
        """Return what was noted, without the times."""
        return [line.split(" ", 2)[2] for line in self.log]


class VmOutageWorld(OutageWorld, VmWorld):
    """The same with VMs on a node with GPUs of its own."""


@pytest.mark.parametrize(
    ("dies_at", "leave"),
    [
        ("cordons", Leave.SUSPEND),
        ("evict", Leave.SUSPEND),
        ("call suspend", Leave.SUSPEND),
        ("call shut", Leave.SHUT_DOWN),
        ("call start", Leave.SUSPEND),
        ("uncordons", Leave.SUSPEND),
    ],
)
async def test_each_step_is_done_after_an_outage_longer_than_its_deadline(dies_at: str, leave: Leave) -> None:
    world = OutageWorld(dies_at, leave)
    world.cluster.mark(world.cluster.nodes[NodeName("worker-3")], MINE, cordon=True, taint=None, labels=())
    world.to_next_switch()
    end_s = world.now_s + 2 * OUTAGE_S
    while world.status.phase != NIGHT and not world.was_held and world.now_s < end_s:
        await world.one_round()
    assert not world.dies_at, "the controller was to die"
    assert (world.status.phase, world.status.transition, world.was_held) == (NIGHT, None, False)
    assert not [line for line in world.done() if line.startswith("delete ") or "power" in line.lower()]


async def test_a_vm_of_a_vgpu_config_is_stopped_after_an_outage_longer_than_its_deadline() -> None:
    world = VmOutageWorld("call asks")
    world.to_next_switch()
    end_s = world.now_s + OUTAGE_S + 100.0
    while world.now_s < end_s:
        await world.one_round()
    assert not world.dies_at, "the controller was to die"
    assert VmStep.STOPPED in {vm.step for vm in world.status.vms}
    assert not world.was_held


@pytest.mark.parametrize("wall_s", [0.0, 1000.0])
async def test_pods_are_deleted_only_after_the_whole_timeout_of_one_leader(wall_s: float) -> None:
    """Also where the wall clock is set forward meanwhile."""
    world = OutageWorld("evict")
    world.cluster.budget_until_s = 1e9
    world.to_next_switch()
    while world.dies_at:
        await world.one_round()
    evicted_s = await world.until("evict ")
    assert not [line for line in world.done() if line.startswith("delete ")]
    world.wall_s = wall_s
    deleted_s = await world.until("delete ")
    assert TIMEOUT_S - 2.0 <= deleted_s - evicted_s <= TIMEOUT_S + 5.0
    assert {worker.forced for worker in world.status.workers} > {0}
    await world.one_round()
    deleted = [line for line in world.done() if line.startswith("delete ")]
    assert 0 < world.status.history[0].deleted <= len(deleted)


async def test_a_switch_that_a_budget_held_goes_on_when_the_budget_allows_it() -> None:
    world = OutageWorld("")
    world.schedule = replace(world.schedule, drain=Drain(TIMEOUT_S))
    await world.until_reached()
    world.cluster.budget_until_s = world.now_s + 1e9
    world.to_next_switch()
    while not world.status.held:
        await world.one_round()
    held_s = world.now_s
    world.log.clear()
    while world.now_s < held_s + 3600.0:
        await world.term.rounds.round()
        world.pass_time(1.0)  # rounds come sooner while another worker goes on
    tried = Counter(line for line in world.done() if line.startswith("evict "))
    world.log.clear()
    assert set(tried.values()) <= {119, 120}
    world.cluster.budget_until_s, allowed_s = 0.0, world.now_s
    await world.until("call suspend")
    assert world.now_s - allowed_s <= 60.0
    await world.until_reached()
    assert world.status.phase == NIGHT


async def at_night() -> OutageWorld:
    """Return a world in which the night has been reached."""
    world = OutageWorld("")
    await world.until_reached()
    world.to_next_switch()
    await world.until_reached()
    assert world.status.phase == NIGHT
    return world


@pytest.mark.parametrize("lag_s", [600.0, 3000.0])
async def test_a_leader_whose_clock_lags_undoes_no_switch(lag_s: float) -> None:
    world = await at_night()
    world.lead_again(-lag_s)
    await world.until_reached()
    assert world.status.phase == NIGHT
    assert not [line for line in world.done() if line.startswith(("call", "evict"))]


async def test_a_switch_far_in_the_future_was_written_by_a_wrong_clock_and_counts_no_more() -> None:
    world = await at_night()
    world.lead_again(-7200.0)
    await world.until_reached()
    assert world.status.phase == DAY


async def test_a_leader_whose_clock_lags_goes_on_with_a_switch_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = OutageWorld("evict")
    await world.until_reached()
    world.to_next_switch()
    while world.dies_at:
        await world.one_round()
    world.lead_again(-OUTAGE_S - 600.0)
    await world.until_reached()
    assert world.status.phase == NIGHT
    assert len([line for line in caplog.messages if "behind the last switch" in line]) == 1


async def test_the_day_is_brought_back_where_the_night_can_not_be_reached_before_its_end() -> None:
    world = OutageWorld("")
    world.schedule = replace(world.schedule, drain=Drain(TIMEOUT_S))
    await world.until_reached()
    world.cluster.budget_until_s = 1e9
    world.to_next_switch()
    following = timeline_of(world.schedule).next_switch(world.now)
    assert following is not None
    while not world.status.waiting or world.status.waiting[0].code is not ReasonCode.PHASE_GIVEN_UP:
        await world.one_round()
        assert world.status.phase == DAY
    assert 1700.0 <= (following.at - world.now).total_seconds() <= 1800.0
    await world.until_reached()
    assert (world.status.phase, world.status.transition, world.status.held) == (DAY, None, ())
    assert {worker.step for worker in world.status.workers if DAY in worker.phases} == {WorkerStep.SERVING}
    assert [reason.code for reason in world.status.waiting] == [ReasonCode.PHASE_GIVEN_UP]
    assert [(switch.phase, switch.cause, switch.outcome) for switch in world.status.history[:2]] == [
        (DAY, SwitchCause.GIVEN_UP, Outcome.REACHED),
        (NIGHT, SwitchCause.SCHEDULE, Outcome.GIVEN_UP),
    ]
    assert await world.one_round() is None
    world.to_next_switch()  # the morning
    await world.until_reached()
    assert (world.status.phase, world.status.given_up) == (DAY, None)
    world.cluster.budget_until_s = 0.0
    world.to_next_switch()
    await world.until_reached()
    assert world.status.phase == NIGHT

"""The explorer's own scheduler: strands take turns, and the strands of a killed process end."""

from functools import partial

import pytest

from gpuvirt_sim.clock import SimClock
from tests.explore.agenda import Option, PossibleEvents
from tests.explore.jobs import ExploredWorker
from tests.explore.loop import ExploredLoop
from tests.explore.scheduler import KilledError, Process, Scheduler, Strand
from tests.explore.strategies import Scripted


def _scheduler(actions: list[Option]) -> Scheduler:
    return Scheduler(Scripted({}), lambda: PossibleEvents(actions=tuple(actions)))


def _kill_once(actions: list[Option], scheduler: Scheduler, process: Process) -> None:
    def act() -> None:
        actions.clear()
        scheduler.kill(process)

    actions.append(Option("kill", act))


@pytest.mark.timeout(20)
def test_a_process_whose_strand_never_ran_can_be_killed_between_two_strands() -> None:
    """The scheduler must not continue a killed process in a strand that has already ended."""
    actions: list[Option] = []
    scheduler = _scheduler(actions)
    first, second, trace = Process("first"), Process("second"), list[str]()
    scheduler.spawn(Strand(first, "ends", lambda: trace.append("ended")))
    waiting = Strand(second, "never runs", lambda: scheduler.point("its first operation"))
    waiting.until = lambda: False
    scheduler.spawn(waiting)
    _kill_once(actions, scheduler, second)
    scheduler.run()
    assert trace == ["ended"]
    assert not scheduler.has_strands(first)
    assert not scheduler.has_strands(second)


@pytest.mark.timeout(20)
def test_a_killed_strand_unwinds_at_its_present_operation() -> None:
    actions: list[Option] = []
    scheduler = _scheduler(actions)
    process, trace = Process("victim"), list[str]()

    def body() -> None:
        trace.append("begins")
        try:
            scheduler.wait(lambda: False)
        except KilledError:
            trace.append("killed")
            raise
        trace.append("goes on")

    scheduler.spawn(Strand(process, "victim", body))
    _kill_once(actions, scheduler, process)
    scheduler.run()
    assert trace == ["begins", "killed"]
    assert not scheduler.has_strands(process)


@pytest.mark.parametrize(("departures", "order"), [({}, ["a0", "a1", "b0", "b1"]), ({1: 1}, ["b0", "b1", "a0", "a1"])])
def test_strands_run_in_the_order_of_the_schedule(departures: dict[int, int], order: list[str]) -> None:
    scheduler = Scheduler(Scripted(departures), PossibleEvents)
    scheduler.exploring, trace = True, list[str]()

    def body(name: str) -> None:
        for number in range(2):
            scheduler.point(name)
            trace.append(f"{name}{number}")

    for name in "ab":
        scheduler.spawn(Strand(Process(name), name, partial(body, name)))
    scheduler.run()
    assert trace == order


@pytest.mark.timeout(20)
def test_an_exception_of_a_callback_ends_the_schedule() -> None:
    scheduler = Scheduler(Scripted({}), PossibleEvents)
    loop = ExploredLoop(scheduler, Process("agent"), SimClock(), reorders=False)
    loop.call_soon(lambda: 1 // 0)
    try:
        with pytest.raises(ZeroDivisionError):
            scheduler.run()
    finally:
        scheduler.stop()
        loop.close()


@pytest.mark.timeout(20)
def test_a_job_that_has_ended_when_its_time_is_over_has_not_timed_out() -> None:
    """Such as that of an event loop that was held back: nothing blocks the job."""
    clock, process = SimClock(), Process("agent")
    scheduler = Scheduler(Scripted({}), PossibleEvents)
    loop = ExploredLoop(scheduler, process, clock, reorders=False)
    worker = ExploredWorker("worker", scheduler, process, loop)

    def end_late() -> int:
        clock.ring_next()
        return 42

    asked = loop.create_task(worker.run(end_late, name="read", timeout_s=1.0))
    try:
        scheduler.run()
    finally:
        scheduler.stop()
        loop.close()
    assert asked.result() == 42

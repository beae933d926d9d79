"""Deadlines: the time in which the process was stopped does not count, wherever the stop was."""

from collections.abc import Sequence

import pytest

from gpuvirt.clock import Deadline
from tests.stoppedclock import StoppedClock


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(3.0, 0.0, 7.0)], id="no stop"),
        pytest.param([(0.05, 2.0, None), (1.0, 0.0, 8.9)], id="a late beat"),
        pytest.param([(0.05, 2.0, 9.9), (0.0, 0.0, 9.9), (1.0, 0.0, 8.9)], id="a beat that has not run yet"),
        pytest.param([(0.05, 0.1, 9.85), (0.0, 0.0, 9.85)], id="a beat that is a little late"),
        pytest.param([(0.05, 0.55, 9.9), (0.1, 0.55, 9.7), (0.1, 0.55, 9.5)], id="stops that are short"),
        pytest.param([(0.05, 2.0, 9.9), (0.05, 3.0, 9.8), (1.0, 0.0, 8.8)], id="two stops"),
        pytest.param([(0.05, 2.0, None), (0.05, 3.0, None), (1.0, 0.0, 8.8)], id="two late beats"),
        pytest.param([(9.85, 100.0, 0.1), (0.0, 0.0, 0.1), (0.15, 0.0, -0.05)], id="a stop for longer than the wait"),
        pytest.param([(9.99, 100.0, 0.1), (0.15, 0.0, -0.05)], id="a stop at the end of the wait"),
        pytest.param([(11.0, 0.0, -1.0), (0.0, 5.0, -6.0), (1.0, 0.0, -7.0)], id="a stop after the deadline"),
    ],
)
async def test_a_stop_moves_the_deadline(steps: Sequence[tuple[float, float, float | None]]) -> None:
    """Each step: the process runs, is stopped, and reads the time that is left unless None is expected."""
    clock = StoppedClock()
    deadline = Deadline(clock, 10.0)
    for runs_s, stopped_s, left_s in steps:
        await clock.advance(runs_s)
        clock.stop(stopped_s)
        assert left_s is None or deadline.left_s == pytest.approx(left_s)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_a_deadline_without_time_has_passed(seconds: float) -> None:
    clock = StoppedClock()
    deadline = Deadline(clock, seconds)
    assert (deadline.left_s, clock.next_s) == (seconds, None)
    deadline.close()


async def test_the_beats_end_with_the_wait() -> None:
    clock = StoppedClock()
    closed = Deadline(clock, 10.0)
    await clock.advance(1.0)
    closed.close()
    assert clock.next_s is None
    passed = Deadline(clock, 10.0)
    await clock.advance(11.0)
    assert (clock.next_s, passed.left_s < 0) == (None, True)

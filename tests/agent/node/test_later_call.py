"""A call that is made later: only the time that was named last counts."""

from gpuvirt.agent.loops.wakes import LaterCall
from gpuvirt_sim.clock import SimClock


async def test_only_the_time_that_was_named_last_counts() -> None:
    clock, calls = SimClock(), list[float]()
    began_s = clock.monotonic_s()
    later = LaterCall(clock, lambda: calls.append(clock.monotonic_s() - began_s))
    later.after(1.0)
    later.at(began_s + 3.0)
    await clock.advance(2)
    assert calls == []
    await clock.advance(2)
    assert calls == [3.0]
    later.at(began_s + 1.0)  # in the past
    await clock.advance(1)
    assert calls == [3.0, 4.0]
    later.after(1.0)
    later.at(None)
    await clock.advance(2)
    assert calls == [3.0, 4.0]

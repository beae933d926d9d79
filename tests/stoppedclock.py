"""A simulated clock of a process that the computer stops."""

from gpuvirt_sim.clock import SimClock


class StoppedClock(SimClock):
    """A clock whose timers can be late."""

    def stop(self, seconds: float) -> None:
        """Let time pass in which no timer runs; the next `advance` runs those that are due."""
        self._now_s += seconds

"""A histogram of durations, for a metrics page."""

from bisect import bisect_left

import msgspec


class Histogram(msgspec.Struct):
    """A histogram of durations."""

    bounds_s: tuple[float, ...]
    counts: list[int] = msgspec.field(default_factory=list)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.total_s += duration_s

"""A histogram of durations, for a metrics page."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """A histogram of durations."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.total_s += duration_s

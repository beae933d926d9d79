"""The agent's counters, for the metrics page."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

ALLOCATE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


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


@dataclass(slots=True)
class Telemetry:
    """All counters. Their keys are the labels of the metrics."""

    allocations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By resource and outcome: `given`, or the code of the reason for a refusal."""
    allocate_s: Histogram = field(default_factory=lambda: Histogram(ALLOCATE_BUCKETS_S))
    registrations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By resource and outcome: `ok` or `failed`."""
    observations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Observations of the host, by depth and cause."""
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Changes of GPUs, by kind and outcome: `done`, or the code of the reason for a failure."""

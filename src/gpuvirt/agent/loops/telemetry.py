"""The agent's counters, for the metrics page."""

from collections import Counter

import msgspec

from gpuvirt.loops.histogram import Histogram

ALLOCATE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class Telemetry(msgspec.Struct):
    """All counters. Their keys are the labels of the metrics."""

    allocations: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """By resource and outcome: `given`, or the code of the reason for a refusal."""
    allocate_s: Histogram = msgspec.field(default_factory=lambda: Histogram(ALLOCATE_BUCKETS_S))
    registrations: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """By resource and outcome: `ok` or `failed`."""
    observations: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """Observations of the host, by depth and cause."""
    gpu_changes: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """Changes of GPUs, by kind and outcome: `done`, or the code of the reason for a failure."""

"""The counts about schedules in one term as the leader, for metrics."""

from collections import Counter
from datetime import datetime

import msgspec

from gpuvirt.loops.histogram import Histogram
from gpuvirt.model.workers.hypervisor import Accepted, Answer, Call
from gpuvirt.model.workers.status import RESTING, ScheduleStatus, WorkerStep

STEP_BUCKETS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
ACCEPTED = "accepted"


class ScheduleTelemetry(msgspec.Struct):
    """All counters. Their keys are the labels of the metrics."""

    calls: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """Calls to hypervisors by action and result: `accepted`, or the code."""
    steps_s: dict[WorkerStep, Histogram] = msgspec.field(default_factory=dict)
    """How long workers were in each step that has ended."""

    def observe_call(self, call: Call, answer: Answer) -> None:
        """Count a call with its answer."""
        result = ACCEPTED if isinstance(answer, Accepted) else answer.code
        self.calls[str(call.action), str(result)] += 1

    def observe_round(self, before: ScheduleStatus, after: ScheduleStatus, now: datetime) -> None:
        """Count the steps that a round has ended."""
        steps = {worker.node: worker.step for worker in after.workers}
        for worker in before.workers:
            if worker.step in RESTING or worker.step is WorkerStep.NONE or worker.since is None:
                continue
            if steps.get(worker.node, worker.step) is not worker.step:
                histogram = self.steps_s.setdefault(worker.step, Histogram(STEP_BUCKETS_S))
                histogram.observe(max(0.0, (now - worker.since).total_seconds()))

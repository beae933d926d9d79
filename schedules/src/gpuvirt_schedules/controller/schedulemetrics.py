"""The metrics of VgpuSchedules, on the controller's page, and the counts of one term as the leader that they show."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

import msgspec

from gpuvirt.kube.kinds.vgpuschedule import CONFIGS_KNOWN, READY, VgpuSchedule
from gpuvirt.loops.histogram import Histogram
from gpuvirt.model.workers.hypervisor import Accepted, Answer, Call
from gpuvirt.model.workers.observed import VmStep
from gpuvirt.model.workers.spec import VmPolicy
from gpuvirt.model.workers.status import RESTING, ScheduleStatus, WorkerStep
from gpuvirt.web.exposition import counter, gauge, histograms
from gpuvirt_schedules.controller.objects import time_of

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


def of_schedules(schedules: Iterable[VgpuSchedule], telemetry: ScheduleTelemetry) -> Iterator[str]:
    """Yield the lines of the metrics; the schedules are those of the controller's namespace."""
    found = tuple(schedules)
    yield from gauge(
        "gpuvirt_schedule_phase",
        "1 for the phase that a VgpuSchedule has reached last.",
        ("schedule", "phase"),
        [((stored.metadata.name, stored.status.phase), 1) for stored in found if stored.status.phase is not None],
    )
    yield from gauge(
        "gpuvirt_schedule_next_switch_timestamp_seconds",
        "When the next phase of a VgpuSchedule begins, in seconds since 1970.",
        ("schedule", "phase"),
        [sample for stored in found for sample in _next_switch(stored)],
    )
    yield from gauge(
        "gpuvirt_schedule_ready",
        "1 if a VgpuSchedule is in its current phase; otherwise 0, with the code of the reason.",
        ("schedule", "reason"),
        [sample for stored in found for sample in _condition(stored, READY)],
    )
    yield from gauge(
        "gpuvirt_schedule_configs_known",
        "1 if each vGPU config that a VgpuSchedule names exists; otherwise 0, with the code of the reason.",
        ("schedule", "reason"),
        [sample for stored in found for sample in _condition(stored, CONFIGS_KNOWN)],
    )
    yield from gauge(
        "gpuvirt_schedule_held_workers",
        "Workers of a VgpuSchedule whose step was not done in time.",
        ("schedule",),
        [((stored.metadata.name,), sum(worker.held for worker in stored.status.workers)) for stored in found],
    )
    yield from gauge(
        "gpuvirt_schedule_held_vms",
        "VMs of a VgpuSchedule with vms: Stop that were not stopped or started in time.",
        ("schedule",),
        [((stored.metadata.name,), sum(vm.held for vm in stored.status.vms)) for stored in found if _has_vms(stored)],
    )
    yield from gauge(
        "gpuvirt_schedule_waiting_nodes",
        "Nodes that do not have the vGPU config of the phase of a VgpuSchedule yet.",
        ("schedule",),
        [((stored.metadata.name,), sum(not node.applied for node in stored.status.nodes)) for stored in found],
    )
    yield from gauge(
        "gpuvirt_schedule_vms",
        "VMs whose vGPUs a phase's vGPU config removes, by the step that each is in.",
        ("schedule", "step"),
        [
            ((stored.metadata.name, str(step)), sum(vm.step is step for vm in stored.status.vms))
            for stored in found
            if _has_vms(stored)
            for step in VmStep
        ],
    )
    yield from histograms(
        "gpuvirt_schedule_step_seconds",
        "How long workers were in the steps of switches.",
        ("step",),
        [((str(step),), histogram) for step, histogram in sorted(telemetry.steps_s.items())],
    )
    yield from counter(
        "gpuvirt_schedule_calls_total",
        "Calls to hypervisors, by result: accepted, or the code of the reason.",
        ("action", "result"),
        telemetry.calls.items(),
    )


def _has_vms(stored: VgpuSchedule) -> bool:
    return any(phase.vms is VmPolicy.STOP for phase in stored.spec.phases) or bool(stored.status.vms)


def _next_switch(stored: VgpuSchedule) -> Iterator[tuple[tuple[str, ...], float]]:
    status = stored.status
    at = time_of(status.next_switch or "")  # None, too, if another program has written the status
    if status.next_phase is not None and at is not None:
        yield (stored.metadata.name, status.next_phase), at.timestamp()


def _condition(stored: VgpuSchedule, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    for condition in stored.status.conditions:
        if condition.type == name:
            yield (stored.metadata.name, condition.reason), float(condition.status == "True")

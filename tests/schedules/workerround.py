"""One round of a schedule with two workers: observations of them, and what it decides."""

from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.workers.hypervisor import Abilities, Ability, Action, Power, VmKey, VmsReading, WorkerVm
from gpuvirt.model.workers.observed import LastCall, NodePod, ScheduleObservation, WorkerNode
from gpuvirt.model.workers.spec import Phase, PhaseName, Schedule
from gpuvirt.model.workers.status import ScheduleStatus, Worker
from gpuvirt_schedules.decide.nextstep import CallVm
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance, advance

DAY, NIGHT = PhaseName("day"), PhaseName("night")
SCHEDULE = Schedule("gpus", "UTC", (Phase(DAY, "0 7 * * *"), Phase(NIGHT, "0 20 * * *")), generation=1)
EVENING = datetime(2026, 1, 5, 20, 0, 5, tzinfo=UTC)
FIRST, FIFTH = NodeName("worker-1"), NodeName("worker-5")
VMS = {
    VmKey("one"): WorkerVm(VmKey("one"), "worker-1", "421c5a83-0000-4000-8000-000000000001", Power.ON),
    VmKey("five"): WorkerVm(VmKey("five"), "worker-5", "421c5a83-0000-4000-8000-000000000005", Power.SUSPENDED),
}
NODES = {
    FIRST: WorkerNode(FIRST, "uid-1", "7", frozenset({DAY}), system_uuid=VMS[VmKey("one")].system_uuid, is_ready=True),
    FIFTH: WorkerNode(FIFTH, "uid-5", "9", frozenset({NIGHT}), system_uuid=VMS[VmKey("five")].system_uuid),
}
CORDONED = replace(NODES[FIRST], is_unschedulable=True, cordoned_by="gpus", cordoned_for_s=60.0)


def observed(
    first: WorkerNode = CORDONED,
    pods: tuple[NodePod, ...] = (),
    volumes: tuple[str, ...] = (),
    vms: VmsReading | None = None,
    calls: Mapping[VmKey, LastCall] | None = None,
) -> ScheduleObservation:
    reading = VMS if vms is None else vms
    nodes = {**NODES, FIRST: first}
    return ScheduleObservation(nodes, {FIRST: pods}, {FIRST: volumes}, reading, calls or {}, abilities=able())


def able(**suspensions: Ability) -> Mapping[VmKey, Abilities]:
    """Return that each VM can leave, but for the suspensions that are given."""
    yes = Ability(True)
    return {key: Abilities(key, suspensions.get(key, yes), yes, yes, yes) for key in VMS}


def decided(
    seen: ScheduleObservation,
    schedule: Schedule = SCHEDULE,
    status: ScheduleStatus | None = None,
    at: datetime = EVENING,
) -> Advance:
    return advance(schedule, timeline_of(schedule), status if status is not None else ScheduleStatus(DAY), seen, at)


def worker(advance: Advance, name: NodeName = FIRST) -> Worker:
    return next(worker for worker in advance.status.workers if worker.node == name)


def calls(advance: Advance) -> list[Action]:
    return [action.call.action for action in advance.actions if isinstance(action, CallVm)]

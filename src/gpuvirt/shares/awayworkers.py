"""Reads which workers get no pods, and which VMs are off, because of a VgpuSchedule: by statuses and nodes' labels."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.vgpuschedule import GROUP, PLURAL, VERSION, VgpuSchedule, VmStatus
from gpuvirt.kube.resources import Collection, Resource
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.away import AwayWorker, ScheduleSeen, away_workers, stopped_vm
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt.model.workers.observed import NodeVm, VmStep
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt.model.workers.status import Worker

ALL_SCHEDULES = Resource(PLURAL, GROUP, VERSION)


async def read_schedules(client: Client) -> tuple[VgpuSchedule, ...]:
    """Return the schedules of all namespaces, none if the kind is not installed; raises ApiError."""
    try:
        return (await client.list(Collection(ALL_SCHEDULES, VgpuSchedule))).items
    except NotFoundError:
        return ()


def away(schedules: Iterable[VgpuSchedule], cordoned_by: Mapping[NodeName, str]) -> Mapping[NodeName, AwayWorker]:
    """Return the workers that get no pods; `cordoned_by` has the schedules of nodes' labels."""
    return away_workers(map(_seen, schedules), cordoned_by)


def stopped_by(schedules: Iterable[VgpuSchedule], uid: str) -> AwayWorker | None:
    """Return why a VM of KubeVirt is off: a schedule has stopped it, or its worker has left; None if none has.

    `uid` is the VM's. A VM that an admin has started or stopped meanwhile is not in a status.
    """
    for schedule in schedules:
        seen = _seen(schedule)
        for vm in schedule.status.vms:
            if vm.uid == uid and vm.step is not VmStep.WAIT:
                return stopped_vm(seen, _vm(vm))
        for worker in schedule.status.workers:
            if worker.vm == uid and (found := away_workers((seen,), {}).get(NodeName(worker.node))) is not None:
                return found
    return None


def _vm(vm: VmStatus) -> NodeVm:
    reason = reasons.stored(vm.code, vm.subject, vm.message, vm.fix)
    node, phase = NodeName(vm.node), PhaseName(vm.phase)
    return NodeVm(VmKey(vm.uid), vm.namespace, vm.name, node, phase, vm.step, is_held=vm.held, reason=reason)


def _seen(schedule: VgpuSchedule) -> ScheduleSeen:
    status, spec = schedule.status, schedule.spec
    transition = status.transition
    workers = tuple(
        Worker(
            NodeName(worker.node),
            phases=tuple(map(PhaseName, worker.phases)),
            types=tuple((PhaseName(phase), vgpu_type) for phase, vgpu_type in worker.types.items()),
            step=worker.step,
        )
        for worker in status.workers
    )
    phase = transition.phase if transition is not None else status.phase
    following = PhaseName(status.next_phase) if status.next_phase is not None else None
    at = local_time(status.next_switch, spec.time_zone) if status.next_switch is not None else None
    reached = PhaseName(phase) if phase is not None else None
    metadata = schedule.metadata
    return ScheduleSeen(metadata.name, metadata.namespace, spec.leave, reached, workers, following, at)


def local_time(text: str, zone: str) -> str | None:
    """Return a time of a status in words, in the schedule's zone; None if it is none."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    try:
        return f"{at.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M %Z}"
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return f"{at.astimezone(UTC):%Y-%m-%d %H:%M UTC}"

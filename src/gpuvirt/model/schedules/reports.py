"""What `gpuvirt schedule` prints: a schedule's state, its switches, a forecast, and what the hypervisor can do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.schedules.forecast import Forecast
from gpuvirt.model.schedules.hypervisor import Abilities, Ability, Power, VmKey, VmsReading, VmsUnknown, WorkerVm
from gpuvirt.model.schedules.moves import unmatched
from gpuvirt.model.schedules.noderows import NodeCheck, NodeRow, VmRow
from gpuvirt.model.schedules.observed import Observed
from gpuvirt.model.schedules.profiles import keeps_type
from gpuvirt.model.schedules.spec import Leave, PhaseName, Schedule, VmPolicy
from gpuvirt.model.schedules.status import Status, Step, Worker
from gpuvirt.model.schedules.times import Switch, Timeline, timeline_of
from gpuvirt.model.schedules.workers import members

AHEAD = timedelta(days=14)
"""How far ahead the switches are listed."""


class ScheduleState(StrEnum):
    """How a schedule is, in one word."""

    INVALID = "Invalid"
    """Its spec has faults, and nothing is done for it."""
    PAUSED = "Paused"
    """`spec.suspend` is set."""
    HELD = "Held"
    """A worker's step was not done in time."""
    SWITCHING = "Switching"
    READY = "Ready"
    PENDING = "Pending"
    """The controller has not followed the spec, or the time, yet."""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule of a list. Times are in UTC."""

    name: str
    state: ScheduleState
    phase: PhaseName | None
    """The phase that was reached last."""
    next_phase: PhaseName | None
    next_switch: datetime | None
    time_zone: str
    workers: int
    nodes: int
    """The nodes that have a vGPU config by the phase of now."""
    reasons: tuple[Reason, ...]
    """What is wrong with the spec, or what workers and nodes wait for."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase with its cron line."""

    name: PhaseName
    start: str
    workers: str
    """The label selector of its workers."""
    next_start: datetime | None
    """When it begins next; None if it does not within two weeks."""
    vgpu_types: tuple[str, ...] = ()
    """The types that its profiles give VMs."""
    nodes: str = ""
    """The label selector of the nodes that get its vGPU config."""
    vgpu_config: str | None = None
    vms: VmPolicy = VmPolicy.WAIT
    """What happens to VMs of these nodes whose vGPUs the vGPU config removes."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker, as the status has it."""

    node: NodeName
    phases: tuple[PhaseName, ...]
    vm: str
    """The name of its VM; empty while none is matched."""
    step: Step
    since: datetime | None
    held: bool
    forced: int
    """The pods that were deleted against budgets."""
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class OverrideRow:
    """A phase that holds for some time, whatever the cron lines say. Times are in UTC."""

    phase: PhaseName
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class ScheduleDetail:
    """One schedule: its spec, and how far it is."""

    schedule: ScheduleRow
    leave: Leave
    announce_s: float
    drain_timeout_s: float
    on_timeout: str
    hypervisor: str
    """The kind of the hypervisor, and the Secret: `vsphere vcenter`."""
    phases: tuple[PhaseRow, ...]
    overrides: tuple[OverrideRow, ...]
    workers: tuple[WorkerRow, ...]
    nodes: tuple[NodeRow, ...]
    configs: str | None = None
    """Which phases name a vGPU config that is missing, or not known; None if the condition ConfigsKnown is True."""
    vms: tuple[VmRow, ...] = ()
    """The VMs of these nodes that a phase waits for, stops or has stopped."""


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """A moment at which another phase begins, in UTC."""

    at: datetime
    announced: datetime
    phase: PhaseName


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The switches of two weeks, and the steps of the next one."""

    schedule: ScheduleRow
    switches: tuple[SwitchRow, ...]
    forecast: Forecast | None
    """None if no phase begins, or if the spec has faults."""
    assumed: Reason | None
    """Why the forecast assumes the VMs' power: the hypervisor gave no answer."""


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """A switch by hand: the override, and the steps that follow. Times are in UTC."""

    schedule: ScheduleRow
    phase: PhaseName
    begin: datetime
    end: datetime
    written: bool
    """Whether the override was written into the spec."""
    forecast: Forecast | None
    """None if the phase holds already."""
    assumed: Reason | None


@dataclass(frozen=True, slots=True)
class WorkerCheck:
    """What the hypervisor says of one worker's VM."""

    node: NodeName
    phases: tuple[PhaseName, ...]
    vm: str
    power: Power | None
    """None while no VM is matched."""
    vgpu_types: tuple[str, ...]
    suspend: Ability | None
    """The abilities are None where the hypervisor reported nothing about the VM."""
    shut_down: Ability | None
    start: Ability | None
    remarks: tuple[str, ...]
    reason: Reason | None
    """Why no call would be made for the worker."""
    set_vgpu_type: Ability | None = None
    phase_types: tuple[str, ...] = ()
    """The types that its phases give its VM, if a switch changes the type: the VM is then shut down."""

    @property
    def is_retyped(self) -> bool:
        """Whether a switch changes the vGPU type of the VM."""
        return bool(self.phase_types)

    def leaves(self, leave: Leave) -> Ability | None:
        """Return the ability by which the worker leaves at the end of its phase."""
        return self.suspend if leave is Leave.SUSPEND and not self.is_retyped else self.shut_down

    def used(self, leave: Leave) -> tuple[Ability | None, ...]:
        """Return the abilities that the schedule uses."""
        return (self.leaves(leave), self.start, *((self.set_vgpu_type,) if self.is_retyped else ()))


@dataclass(frozen=True, slots=True)
class ScheduleCheck:
    """What holds for each worker and each node of a schedule before anything happens."""

    schedule: ScheduleRow
    leave: Leave
    hypervisor: Reason | None
    """Why the hypervisor gave no answer."""
    workers: tuple[WorkerCheck, ...]
    nodes: tuple[NodeCheck, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is known to keep the schedule from switching."""
        if self.schedule.state is ScheduleState.INVALID or self.hypervisor is not None:
            return False
        if any(node.reason is not None for node in self.nodes):
            return False
        return all(worker.reason is None and not self._refused(worker) for worker in self.workers)

    def _refused(self, worker: WorkerCheck) -> bool:
        return any(ability is None or ability.is_possible is False for ability in worker.used(self.leave))


def row_of(schedule: Schedule, status: Status, problems: tuple[Reason, ...], now: datetime) -> ScheduleRow:
    """Return the row of a schedule; `problems` has what is wrong with its spec."""
    timeline = None if problems else timeline_of(schedule)
    following = timeline.next_switch(now) if timeline is not None else None
    return ScheduleRow(
        schedule.name,
        _state(schedule, status, timeline, now) if timeline is not None else ScheduleState.INVALID,
        status.phase,
        following.phase if following is not None else None,
        following.at if following is not None else None,
        schedule.time_zone,
        len(status.workers),
        len(status.nodes),
        problems or status.waiting,
    )


def _state(schedule: Schedule, status: Status, timeline: Timeline, now: datetime) -> ScheduleState:
    current = timeline.current(now)
    if schedule.is_suspended:
        return ScheduleState.PAUSED
    if status.held or status.held_vms:
        return ScheduleState.HELD
    if status.transition is not None or not all(node.is_applied for node in status.nodes):
        return ScheduleState.SWITCHING
    follows = status.generation == schedule.generation and (current is None or status.phase == current.phase)
    return ScheduleState.READY if follows else ScheduleState.PENDING


def phase_rows(
    schedule: Schedule,
    selectors: Mapping[PhaseName, str],
    node_selectors: Mapping[PhaseName, str],
    switches: tuple[SwitchRow, ...],
) -> tuple[PhaseRow, ...]:
    """Return the phases, each with its next start among the switches."""
    return tuple(
        PhaseRow(
            phase.name,
            phase.start,
            selectors.get(phase.name, ""),
            next((switch.at for switch in switches if switch.phase == phase.name), None),
            tuple(profile.vgpu_type for profile in phase.profiles),
            node_selectors.get(phase.name, ""),
            phase.vgpu_config,
            phase.vms,
        )
        for phase in schedule.phases
    )


def worker_rows(status: Status) -> tuple[WorkerRow, ...]:
    """Return the workers of a status."""
    return tuple(
        WorkerRow(
            worker.node,
            worker.phases,
            worker.vm_name,
            worker.step,
            worker.since,
            worker.is_held,
            worker.forced,
            worker.reason,
        )
        for worker in status.workers
    )


def switch_rows(schedule: Schedule, now: datetime) -> tuple[SwitchRow, ...]:
    """Return the switches of the next two weeks of a schedule without faults."""
    until, announce = now + AHEAD, timedelta(seconds=schedule.announce_s)

    def is_near(switch: Switch) -> bool:
        return switch.at <= until

    near = takewhile(is_near, timeline_of(schedule).switches(now))
    return tuple(SwitchRow(switch.at, switch.at - announce, switch.phase) for switch in near)


def checks(
    schedule: Schedule,
    status: Status,
    observed: Observed,
    abilities: Mapping[VmKey, Abilities],
) -> Iterator[WorkerCheck]:
    """Yield what holds for each worker; `abilities` has what the hypervisor reported about VMs."""
    for worker in members(status.workers, observed, schedule.name).workers:
        node = observed.nodes.get(worker.node)
        vms = observed.vms
        vm = None if isinstance(vms, VmsUnknown) else vms.get(worker.vm)
        known = abilities.get(worker.vm) if worker.vm else None
        yield WorkerCheck(
            worker.node,
            worker.phases,
            vm.name if vm is not None else worker.vm_name,
            vm.power if vm is not None else None,
            vm.vgpu_types if vm is not None else (),
            known.suspend if known is not None else None,
            known.shut_down if known is not None else None,
            known.start if known is not None else None,
            known.remarks if known is not None else (),
            None if isinstance(vms, VmsUnknown) else unmatched(worker, node, vms),
            known.set_vgpu_type if known is not None else None,
            _phase_types(worker, vm),
        )


def _phase_types(worker: Worker, vm: WorkerVm | None) -> tuple[str, ...]:
    """Return the types of a worker's phases; nothing if its VM keeps the one that it has."""
    keeps = keeps_type(worker, vm) if vm is not None else len({name for _, name in worker.types}) < 2
    return () if keeps else tuple(vgpu_type for _, vgpu_type in worker.types)


def unknown_reason(vms: VmsReading) -> Reason | None:
    """Return why a hypervisor gave no answer; None if it gave one."""
    return reasons.hypervisor_unknown(vms.code, vms.text) if isinstance(vms, VmsUnknown) else None

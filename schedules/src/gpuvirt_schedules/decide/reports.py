"""The output of `gpuvirt schedule`: a schedule's state, its phases and workers, its switches, and a forecast."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import VmsReading, VmsUnknown
from gpuvirt.model.workers.spec import Leave, PhaseName, Schedule, VmPolicy
from gpuvirt.model.workers.status import PastSwitch, ScheduleStatus, WorkerStep
from gpuvirt_schedules.decide.forecast import Forecast
from gpuvirt_schedules.decide.noderows import NodeRow, VmRow
from gpuvirt_schedules.decide.times import Switch, Timeline, timeline_of

AHEAD = timedelta(days=14)
"""How far ahead the switches are listed."""


class ScheduleState(StrEnum):
    """How a schedule is, in one word."""

    INVALID = "Invalid"
    """Its spec has faults, and nothing is done for it."""
    PAUSED = "Paused"
    """`spec.suspend` is set."""
    HELD = "Held"
    """A worker's step was not done in time, or the phase was given up for that."""
    SWITCHING = "Switching"
    READY = "Ready"
    PENDING = "Pending"
    """The controller has not followed the spec, or the time, yet."""


class ScheduleRow(msgspec.Struct, frozen=True):
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
    """The nodes whose vGPU config the current phase sets."""
    reasons: tuple[Reason, ...]
    """The faults in the spec, or the reasons why workers and nodes wait."""


class PhaseRow(msgspec.Struct, frozen=True):
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
    """The policy for VMs of these nodes whose vGPUs the vGPU config removes."""


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker, as the status has it."""

    node: NodeName
    phases: tuple[PhaseName, ...]
    vm: str
    """The name of its VM; empty while none is matched."""
    step: WorkerStep
    since: datetime | None
    held: bool
    forced: int
    """The pods that were deleted against budgets."""
    reason: Reason | None


class OverrideRow(msgspec.Struct, frozen=True):
    """A phase that applies for some time, instead of the phase of the cron lines. Times are in UTC."""

    phase: PhaseName
    begin: datetime
    end: datetime


class ScheduleDetail(msgspec.Struct, frozen=True):
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
    """The phases whose vGPU config is missing or not known, as text; None if the condition ConfigsKnown is True."""
    vms: tuple[VmRow, ...] = ()
    """The VMs of these nodes that a phase waits for, stops or has stopped."""


class SwitchRow(msgspec.Struct, frozen=True):
    """A moment at which another phase begins, in UTC."""

    at: datetime
    announced: datetime
    phase: PhaseName


class SchedulePlan(msgspec.Struct, frozen=True):
    """The switches of two weeks, and the steps of the next one."""

    schedule: ScheduleRow
    switches: tuple[SwitchRow, ...]
    forecast: Forecast | None
    """None if no phase begins, or if the spec has faults."""
    assumed: Reason | None
    """Why the forecast assumes the VMs' power: the hypervisor gave no answer."""
    left_out: tuple[Switch, ...] = ()
    """The phases that do not begin, since spring leaves out the hour of their window, and the end of that hour."""


class ScheduleHistory(msgspec.Struct, frozen=True):
    """The last switches of a schedule. Times are in UTC."""

    schedule: ScheduleRow
    switches: tuple[PastSwitch, ...]
    """The newest first."""


class SwitchResult(msgspec.Struct, frozen=True):
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


def row_of(schedule: Schedule, status: ScheduleStatus, problems: tuple[Reason, ...], now: datetime) -> ScheduleRow:
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


def _state(schedule: Schedule, status: ScheduleStatus, timeline: Timeline, now: datetime) -> ScheduleState:
    current = timeline.current(now)
    if schedule.is_suspended:
        return ScheduleState.PAUSED
    if status.held or status.held_vms or status.given_up is not None:
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


def worker_rows(status: ScheduleStatus) -> tuple[WorkerRow, ...]:
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


def left_out(schedule: Schedule, now: datetime) -> tuple[Switch, ...]:
    """Return the phases that spring leaves out in the next two weeks of a schedule without faults."""
    return tuple(timeline_of(schedule).left_out(now, now + AHEAD))


def unknown_reason(vms: VmsReading) -> Reason | None:
    """Return why a hypervisor gave no answer; None if it gave one."""
    return reasons.hypervisor_unknown(vms.code, vms.text) if isinstance(vms, VmsUnknown) else None

"""The output of `gpuvirt schedule`: the state of schedules, workers, nodes and VMs, switches, checks and a forecast."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Abilities, Ability, Power, VmKey, VmsReading, VmsUnknown
from gpuvirt.model.workers.observed import ScheduleObservation, VmStep
from gpuvirt.model.workers.spec import Leave, PhaseName, Schedule, VmPolicy
from gpuvirt.model.workers.status import PastSwitch, ScheduleStatus, WorkerStep
from gpuvirt_schedules.decide.forecast import Forecast
from gpuvirt_schedules.decide.matching import prove
from gpuvirt_schedules.decide.nextstep import keeps_type
from gpuvirt_schedules.decide.times import Switch, Timeline, timeline_of
from gpuvirt_schedules.decide.workers import members


class NodeRow(msgspec.Struct, frozen=True):
    """A node that has a vGPU config by the current phase, as the status has it."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    applied: bool
    reason: Reason | None
    """Why it is not applied."""


class VmRow(msgspec.Struct, frozen=True):
    """A VM whose vGPU the vGPU config of a phase removes, as the status has it."""

    vm: str
    """Its namespace and name: `default/vm-1`."""
    node: NodeName
    phase: PhaseName
    """The phase that waits for it, stops it or has stopped it."""
    step: VmStep
    since: datetime | None
    held: bool
    forced: bool
    """Whether it was stopped against a PodDisruptionBudget."""
    reason: Reason | None


class GpuCheck(msgspec.Struct, frozen=True):
    """A GPU whose vGPUs would change, or that something keeps from changing."""

    address: str
    vgpus: Mapping[str, int]
    """Its vGPUs now, by type as in configs."""
    vgpus_then: Mapping[str, int] | None
    """The vGPUs that it would have while the current users stay; None where that is not known."""
    in_the_way: tuple[str, ...]
    """The VMs, other pods and processes that use vGPUs which would go: the node waits for them."""
    reasons: tuple[str, ...]
    """Why its agent would refuse the change, or wait."""
    unknown: tuple[str, ...]
    """The facts that only the node can show."""


class NodeCheck(msgspec.Struct, frozen=True):
    """The changes that the vGPU config of one phase would make on a node, by the current report of its agent."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    reason: Reason | None
    """Why the node would not get the vGPU config, even if nobody used its vGPUs."""
    gpus: tuple[GpuCheck, ...] = ()
    unknown: tuple[str, ...] = ()
    """Why it is not known what would change on the node."""
    vms: VmPolicy = VmPolicy.WAIT
    """The policy for the VMs among the users in `in_the_way`."""

    @property
    def in_the_way(self) -> tuple[str, ...]:
        """The users for which the node would wait."""
        return tuple(dict.fromkeys(user for gpu in self.gpus for user in gpu.in_the_way))


AHEAD = timedelta(days=14)
"""How far ahead the switches are listed."""


class ScheduleState(StrEnum):
    """How a schedule is, in one word."""

    INVALID = "Invalid"
    """Its spec has faults, and nothing is done for it."""
    PAUSED = "Paused"
    """`spec.suspend` is set."""
    HELD = "Held"
    """A worker's step was not done in time, or the phase was given up for that; or a right or the Secret is missing."""
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
    namespace: str = ""


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
    announce = timedelta(seconds=schedule.announce_s)
    near = takewhile(lambda switch: switch.at <= now + AHEAD, timeline_of(schedule).switches(now))
    return tuple(SwitchRow(switch.at, switch.at - announce, switch.phase) for switch in near)


def unknown_reason(vms: VmsReading) -> Reason | None:
    """Return why a hypervisor gave no answer; None if it gave one."""
    return reasons.hypervisor_unknown(vms.code, vms.text) if isinstance(vms, VmsUnknown) else None


class WorkerCheck(msgspec.Struct, frozen=True):
    """The hypervisor's report on one worker's VM."""

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


class ScheduleCheck(msgspec.Struct, frozen=True):
    """The checks of each worker and each node of a schedule before anything happens."""

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
        used = [ability for worker in self.workers for ability in worker.used(self.leave)]
        is_refused = any(ability is None or ability.is_possible is False for ability in used)
        return not is_refused and all(worker.reason is None for worker in self.workers)


def worker_checks(
    schedule: Schedule,
    status: ScheduleStatus,
    observed: ScheduleObservation,
    abilities: Mapping[VmKey, Abilities],
) -> Iterator[WorkerCheck]:
    """Yield what holds for each worker; `abilities` has what the hypervisor reported about VMs."""
    for worker in members(status.workers, observed, schedule.name).workers:
        node = observed.nodes.get(worker.node)
        vms = observed.vms
        vm = None if isinstance(vms, VmsUnknown) else vms.get(worker.vm)
        proof = None if isinstance(vms, VmsUnknown) else prove(worker, node, vms)
        keeps = keeps_type(worker, vm) if vm is not None else len({name for _, name in worker.types}) < 2
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
            proof if isinstance(proof, Reason) else None,
            known.set_vgpu_type if known is not None else None,
            () if keeps else tuple(vgpu_type for _, vgpu_type in worker.types),
        )

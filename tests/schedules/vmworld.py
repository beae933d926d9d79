"""A world with a node of its own GPUs: in the night VMs whose vGPUs go are stopped, and they come back by day.

KubeVirt is a model: a write names the version that it was decided for, and one without an answer may arrive later. What
a PodDisruptionBudget allows is counted some seconds after a VM has ended.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.reasons import schedules as vmreasons
from gpuvirt.model.workers.hypervisor import Accepted, Action, Answer, OutcomeUnknown, Refused, VmKey
from gpuvirt.model.workers.observed import BlockedGpu, ChangeVm, NodeVm, ObservedVm, ObservedVms, VmStep
from gpuvirt.model.workers.spec import OnTimeout, Phase, PhaseName, Schedule, VmPolicy
from gpuvirt.model.workers.status import ConfiguredNode
from gpuvirt_schedules.controller.rounds import ClusterReading, StoredSchedule
from gpuvirt_schedules.decide.times import timeline_of
from tests.schedules.choices import Choices
from tests.schedules.modelhypervisor import Fault
from tests.schedules.world import DAY, NIGHT, ModelApi, Term, World

NODE, NAMESPACE = NodeName("bare-1"), "vms"
ENDS_S, STARTS_S = 20.0, 10.0
DEADLINES_S = 1500.0
"""Longer than the deadlines of a stop and a start together."""
COUNTED_S = 4.0
"""How long the controller of budgets takes to count a VM that has ended."""
ARRIVES_S = 50.0
"""How late a write without an answer may arrive."""
BUDGET = "vms/pdb"


@dataclass(slots=True)
class Guest:
    """One VM, and what it really is."""

    key: VmKey
    gpu: int
    has_budget: bool = False
    is_controlled: bool = False
    version: int = 1
    is_halted: bool = False
    is_on: bool = True
    has_vgpu: bool = True
    """Whether it has a vGPU of the day."""
    changes_until_s: float | None = None
    stopped_by_us: bool = False
    started_by_hand: PhaseName | None = None
    """The phase that had stopped it when an admin started it."""
    ended_s: float = -1e9
    late: list[tuple[float, Action, int]] = field(default_factory=list)
    """The writes that arrive later: when, what, and for which version."""


class VmWorld(World):
    """The world of one run: two VMs on the first GPU, one on the second, and one that another object controls."""

    def __init__(self, choices: Choices) -> None:
        budgets = choices.pick([2, 1]) == 1
        self.guests = {
            guest.key: guest
            for guest in (
                Guest(VmKey("a"), 0, has_budget=budgets),
                Guest(VmKey("b"), 0),
                Guest(VmKey("c"), 1, has_budget=budgets),
                Guest(VmKey("d"), 2, has_budget=budgets),
                Guest(VmKey("e"), 3, is_controlled=True),
                Guest(VmKey("f"), 3),
            )
        }
        self.allowed = 1 + choices.pick([1, 1])
        """How many of the VMs with the budget may be off."""
        self.other_gpu: int | None = None
        """The GPU with a vGPU that a pod uses."""
        self.other_since_s = 0.0
        self.are_vms_known = True
        self._phase_until: tuple[Schedule | None, datetime, PhaseName] = None, datetime.min.replace(tzinfo=UTC), DAY
        super().__init__(choices)

    @override
    def phases(self, day: str) -> tuple[Phase, ...]:
        """Return the phases with their vGPU configs."""
        found = super().phases(day)
        return tuple(replace(phase, vgpu_config=f"of-{phase.name}", vms=VmPolicy.STOP) for phase in found)

    @override
    def new_api(self, term: Sequence[Term]) -> ModelApi:
        """Return the API server with VMs."""
        return VmApi(self, term)

    @property
    def phase(self) -> PhaseName:
        """The current phase."""
        schedule, until, phase = self._phase_until
        if schedule is not self.schedule or self.now >= until:
            timeline = timeline_of(self.schedule)
            current, following = timeline.current(self.now), timeline.next_switch(self.now)
            assert current is not None
            assert following is not None
            schedule, until, phase = self._phase_until = self.schedule, following.at, current.phase
        return phase

    def users(self, gpu: int) -> list[Guest]:
        """Return the VMs that have a vGPU of the day on a GPU."""
        return [guest for guest in self.guests.values() if guest.gpu == gpu and guest.has_vgpu]

    def has_users(self) -> bool:
        """Return whether a vGPU of the day is used."""
        return self.other_gpu is not None or any(guest.has_vgpu for guest in self.guests.values())

    @override
    def pass_time(self, seconds: float) -> None:
        """Let KubeVirt and its guests act."""
        super().pass_time(seconds)
        for guest in self.guests.values():
            arrived = [write for write in guest.late if write[0] <= self.now_s]
            guest.late = [write for write in guest.late if write[0] > self.now_s]
            for _, action, version in arrived:
                self.note(f"a late write arrives: {action} of {guest.key}")
                self.write(guest, action, version)
            if guest.started_by_hand != self.phase:
                guest.started_by_hand = None
            if guest.changes_until_s is not None and self.now_s >= guest.changes_until_s:
                guest.changes_until_s = None
                guest.is_on = not guest.is_halted
                guest.has_vgpu = guest.is_on and self.phase == DAY
                guest.ended_s = self.now_s if not guest.is_on else guest.ended_s
            elif guest.is_on and not guest.has_vgpu and guest.changes_until_s is None and self.phase == DAY:
                guest.has_vgpu = True  # the scheduler finds one

    def write(self, guest: Guest, action: Action, version: int) -> bool:
        """Carry out a write of the schedule; return whether it was for the version that there is."""
        if version != guest.version:
            return False
        guest.version += 1
        guest.is_halted = action is Action.SHUT_DOWN
        guest.stopped_by_us = guest.is_halted
        guest.changes_until_s = self.now_s + (ENDS_S if guest.is_halted else STARTS_S)
        return True

    @override
    def event(self) -> None:
        """Let an admin, a pod or the clock do something."""
        if self.choices.pick([2, 3]) == 0:
            super().event()
            return
        guest = list(self.guests.values())[self.choices.pick([1] * len(self.guests))]
        match self.choices.pick([2, 2, 2, 2]):
            case 0:
                self._start_by_hand(guest)
            case 1:
                self._halt_by_hand(guest)
            case 2:
                self.other_gpu = None if self.other_gpu is not None else self.choices.pick([1, 1, 1])
                self.other_since_s = self.now_s
                self.note(f"a pod uses GPU {self.other_gpu}")
            case _:
                self.are_vms_known = not self.are_vms_known
                self.note(f"the VMs can be read: {self.are_vms_known}")

    def _start_by_hand(self, guest: Guest) -> None:
        if guest.is_on or guest.changes_until_s is not None:
            return
        self.note(f"an admin starts {guest.key}")
        record = next((vm for vm in self.status.vms if vm.vm == guest.key), None)
        is_stopped = record is not None and record.step is VmStep.STOPPED and record.phase == self.phase
        guest.started_by_hand = self.phase if is_stopped else None
        guest.version += 1
        guest.is_halted = guest.stopped_by_us = False
        guest.is_on = True
        guest.has_vgpu = self.phase == DAY or self.choices.pick([1, 1]) == 1

    def _halt_by_hand(self, guest: Guest) -> None:
        if not guest.is_on or guest.changes_until_s is not None or guest.is_controlled:
            return
        self.note(f"an admin halts {guest.key}")
        guest.version += 1
        guest.is_halted, guest.stopped_by_us = True, False
        guest.changes_until_s = self.now_s + ENDS_S

    def judge_stop(self, guest: Guest, term: Term) -> None:
        """Judge a stop that a controller asks for."""
        record = next((vm for vm in self.status.vms if vm.vm == guest.key), None)
        if term.leads and (record is None or record.step is not VmStep.STOP):
            self.violate(f"stopped without being in the status: {guest}")
        if guest.is_controlled:
            self.violate(f"foreign VM: {guest}")
        if guest.started_by_hand == self.phase and term.read_s > 0.0:
            self.violate(f"stopped again against an admin: {guest}")
        if any(other.is_controlled for other in self.users(guest.gpu)):
            self.violate(f"stopped beside a VM that stays: {guest}")
        if self.other_gpu == guest.gpu and self.other_since_s < self.now_s - 5.0:
            self.violate(f"stopped beside a pod: {guest}")
        is_forced = self.schedule.drain.on_timeout is OnTimeout.FORCE
        if guest.has_budget and not is_forced and self._off() >= self.allowed:
            self.violate(f"stopped against a budget: {guest}")

    def _off(self) -> int:
        """Return how many VMs with the budget a schedule has stopped."""
        return sum(guest.has_budget and guest.stopped_by_us for guest in self.guests.values())

    def disruptions_allowed(self) -> int:
        """Return what the status of the budget says."""
        off = (
            guest.has_budget and not guest.is_on and guest.ended_s < self.now_s - COUNTED_S
            for guest in self.guests.values()
        )
        return max(0, self.allowed - sum(off))

    @override
    async def settle(self) -> None:
        """Let everything work for longer than each deadline, or until nothing is under way."""
        self.are_vms_known = True
        for node in self.cluster.nodes.values():
            if not node.exists:
                self._register(node, keeps_labels=True)
        self.is_calm, self.hypervisor.is_reachable, self.cluster.budget_until_s = True, True, 0.0
        if self.schedule.is_suspended:
            self._suspend(is_suspended=False)
        if not self.term.leads:
            self.term = self._new_term()
        end_s = self.now_s + DEADLINES_S
        while self.now_s < end_s and await self.one_round() is not None:
            pass
        self.pass_time(60.0)
        await self.one_round()

    @override
    def judge_end(self) -> None:
        """Judge the VMs after a long calm time."""
        phase, known = self.phase, {vm.vm: vm for vm in self.status.vms}
        for guest in self.guests.values():
            record = known.get(guest.key)
            if guest.stopped_by_us and (record is None or (record.phase != phase and not record.is_held)):
                self.violate(f"left stopped: {guest} {record}")
            if record is not None and record.step is not VmStep.STOPPED and record.reason is None:
                self.violate(f"no reason: {record}")
        if phase == NIGHT and self.other_gpu != 1 and not any(vm.has_budget for vm in self.guests.values()):
            guest = self.guests[VmKey("c")]
            record = known.get(guest.key)
            by_hand = record is not None and (record.is_held or record.step is VmStep.STOPPED)
            if guest.has_vgpu and not by_hand:  # one that was stopped runs because an admin has started it
                self.violate(f"not stopped: {guest} {record}")


class VmApi(ModelApi):
    """The API server with KubeVirt's kinds, and a node whose agent reports."""

    def __init__(self, world: VmWorld, term: Sequence[Term]) -> None:
        super().__init__(world, term)
        self._vms = world
        self._versions: dict[VmKey, int] = {}

    @override
    async def read(self, stored: StoredSchedule) -> ClusterReading:
        """Return the workers, and the node with GPUs of its own."""
        found = await super().read(stored)
        phase = self._vms.phase
        config, waits = f"of-{phase}", phase == NIGHT and self._vms.has_users()
        why = reasons.vgpu_config_pending(NODE, config, "in use", "VgpuInUse") if waits else None
        return replace(found, configured=(ConfiguredNode(NODE, phase, config, why),))

    @override
    async def read_vms(self, waiting: Iterable[ConfiguredNode], known: Iterable[NodeVm]) -> ObservedVms:
        """Return the VMs and the GPUs, in this order."""
        del known
        await self._read("list VMs")
        world = self._vms
        if not world.are_vms_known:
            return ObservedVms(unknown={NAMESPACE: reasons.hypervisor_unknown("HypervisorForbidden", "forbidden")})
        self._versions = {guest.key: guest.version for guest in world.guests.values()}
        vms = {guest.key: _seen(guest, world.disruptions_allowed()) for guest in world.guests.values()}
        gpus = tuple(_gpu(gpu, world) for gpu in range(4)) if any(node.node == NODE for node in waiting) else ()
        return ObservedVms(vms, {}, tuple(gpu for gpu in gpus if gpu.vms or gpu.others))

    @override
    async def change_vm(self, change: ChangeVm) -> Answer:
        """Halt or start a VM; an answer may be lost, and the write may arrive later."""
        world, call = self._vms, change.call
        guest, version = world.guests[call.vm], self._versions[call.vm]
        fault = await world.point(f"call {change.text}", self._term)
        if not self._term.leads and fault is not Fault.LATE:
            return Refused("LeaseLost", "this process does not lead")
        if call.action is Action.SHUT_DOWN and version == guest.version and fault is not Fault.REFUSED:
            world.judge_stop(guest, self._term)
        match fault:
            case Fault.REFUSED:
                return Refused("HypervisorRefused", "the API server is overloaded")
            case Fault.LOST_REQUEST:
                return OutcomeUnknown("HypervisorCallFailed", "the connection broke")
            case Fault.LATE:
                after_s = ARRIVES_S * (1 + world.choices.pick([1, 1, 1])) / 3
                guest.late.append((world.now_s + after_s, call.action, version))
                return OutcomeUnknown("HypervisorCallFailed", "no answer came in time")
            case _:
                is_made = world.write(guest, call.action, version)
        if fault is Fault.LOST_ANSWER:
            return OutcomeUnknown("HypervisorCallFailed", "the connection broke")
        return Accepted() if is_made else Refused("WrongPowerState", "the VM has changed")


def _seen(guest: Guest, allowed: int) -> ObservedVm:
    where = f"{NAMESPACE}/{guest.key}"
    refusal = vmreasons.vm_not_stopped(where, "a VirtualMachinePool controls it") if guest.is_controlled else None
    by_admin = vmreasons.vm_not_stopped(where, "Halted by an admin")
    return ObservedVm(
        guest.key,
        NAMESPACE,
        guest.key,
        guest.is_on,
        guest.changes_until_s is not None,
        guest.is_halted,
        refusal,
        by_admin if guest.is_halted and not guest.stopped_by_us else None,
        {BUDGET: allowed} if guest.has_budget else {},
    )


def _gpu(gpu: int, world: VmWorld) -> BlockedGpu:
    others = ("pod default/train-0",) if world.other_gpu == gpu else ()
    return BlockedGpu(NODE, f"gpu-{gpu}", tuple(guest.key for guest in world.users(gpu)), others)

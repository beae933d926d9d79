"""A hypervisor with one GPU for some VMs. It carries calls out over time, loses answers, and delivers calls late."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Ability,
    Accepted,
    Action,
    Answer,
    Call,
    OutcomeUnknown,
    Power,
    Refused,
    VmKey,
    VmsReading,
    VmsUnknown,
    WorkerVm,
)

CAPACITY = 16
"""GiB of the GPU's framebuffer."""
CHANGE_S = 30.0
SET_S = 3.0
LATE_S = 45.0
DYING_S = 4.0
"""When a call is delivered whose sender has just died, and whose connection is not reset yet."""


class Fault(StrEnum):
    """The fault of one request, or none."""

    NONE = "none"
    REFUSED = "refused"
    LOST_REQUEST = "lost request"
    LOST_ANSWER = "lost answer"
    LATE = "late"
    """The request is delivered some time later, unless its sender is dead by then."""


class Before(Protocol):
    """Called at each request."""

    async def __call__(self, what: str, /) -> Fault:
        """Return what goes wrong with it."""
        ...


class Vm(msgspec.Struct):
    """A VM of the model."""

    key: VmKey
    name: str
    system_uuid: str
    gpu: int
    """GiB of the GPU that it has while it is on."""
    power: Power = Power.OFF
    becomes: Power | None = None
    changes_until_s: float = 0.0
    on_since_s: float = 0.0
    by_hand_s: float = -1e9
    vgpu_type: str = "grid"
    new_type: str | None = None
    """The type that it is being given."""

    @property
    def has_gpu(self) -> bool:
        """Whether the GPU's memory is taken."""
        return self.power is Power.ON or self.becomes is not None

    @property
    def is_changing(self) -> bool:
        """Whether a call is being carried out."""
        return self.becomes is not None or self.new_type is not None

    def set_type(self, vgpu_type: str) -> None:
        """Give it a type `grid-4q`, and its share of the GPU."""
        self.vgpu_type, self.new_type = vgpu_type, None
        self.gpu = int(vgpu_type.rpartition("-")[2].removesuffix("q"))


class Late(msgspec.Struct):
    """A call under way, and the connection that sends it."""

    at_s: float
    call: Call
    sender: "Connection"
    was_given_up: bool = True
    """Whether its sender has taken its outcome for unknown; otherwise the sender has died."""


class ModelHypervisor(msgspec.Struct):
    """The hypervisor, with all its VMs."""

    vms: dict[VmKey, Vm]
    now_s: Callable[[], float]
    on_call: Callable[[Call, "Connection"], None]
    """Called for each call that is carried out, before it is."""
    on_violation: Callable[[str], None]
    is_reachable: bool = True
    rigid: set[VmKey] = msgspec.field(default_factory=set)
    """The VMs that can't be suspended, by what `check` says."""
    late: list[Late] = msgspec.field(default_factory=list)
    unread: set[VmKey] = msgspec.field(default_factory=set)
    """The VMs that were not read since a call of unknown outcome."""

    def pass_time(self) -> None:
        """End changes, and deliver what is late."""
        now_s = self.now_s()
        for late in [late for late in self.late if late.at_s <= now_s]:
            self.late.remove(late)
            if late.sender.dead_at_s is None or late.at_s < late.sender.dead_at_s:
                if late.was_given_up:
                    self.on_violation(f"delivered late: {late.call}")
                self.carry_out(late.call, late.sender)
        for vm in self.vms.values():
            if vm.becomes is not None and vm.changes_until_s <= now_s:
                vm.power, vm.becomes = vm.becomes, None
                vm.on_since_s = now_s
            if vm.new_type is not None and vm.changes_until_s <= now_s:
                vm.set_type(vm.new_type)

    def carry_out(self, call: Call, sender: "Connection") -> Answer:
        """Begin a call."""
        vm = self.vms[call.vm]
        if call.action is Action.SET_VGPU_TYPE:
            return self._set_type(vm, call, sender)
        desired = Power.ON if call.action is Action.START else Power.SUSPENDED
        if call.action in {Action.SHUT_DOWN, Action.POWER_OFF}:
            desired = Power.OFF
        if vm.is_changing or vm.power is desired:
            return Refused("CallRefused", "the VM is changing, or is in this state already")
        self.on_call(call, sender)
        used = sum(other.gpu for other in self.vms.values() if other.has_gpu)
        if desired is Power.ON and used + vm.gpu > CAPACITY:
            return Refused("NoGraphicsCapacity", "the GPU has too little memory left")
        vm.becomes, vm.changes_until_s = desired, self.now_s() + CHANGE_S
        return Accepted()

    def _set_type(self, vm: Vm, call: Call, sender: "Connection") -> Answer:
        self.on_call(call, sender)
        if vm.is_changing or vm.power is not Power.OFF:
            return Refused("WrongPowerState", "the VM is not off")
        vm.new_type, vm.changes_until_s = call.vgpu_type, self.now_s() + SET_S
        return Accepted()

    def has_others_call(self, sender: "Connection | None") -> bool:
        """Return whether a call of another connection may still be delivered."""
        now_s = self.now_s()
        return any(
            late.sender is not sender and (late.sender.dead_at_s is None or now_s < late.sender.dead_at_s)
            for late in self.late
        )

    def abilities(self, key: VmKey) -> Abilities:
        """Return what can be done with a VM."""
        suspend = (
            Ability(False, "SuspendNotSupported", "suspendSupported: false") if key in self.rigid else Ability(True)
        )
        shut_down = Ability(None, "GuestToolsMissing", "no guest tools run")
        return Abilities(key, suspend, shut_down, Ability(True), Ability(True), ("migration with grid: no",))

    def reading(self) -> Mapping[VmKey, WorkerVm]:
        """Return what a connection shows."""
        return {
            vm.key: WorkerVm(vm.key, vm.name, vm.system_uuid, vm.power, (vm.vgpu_type,), vm.is_changing)
            for vm in self.vms.values()
        }


class Connection:
    """One connection; `before` is called at each request, and returns what goes wrong with it."""

    def __init__(self, hypervisor: ModelHypervisor, has_lease: Callable[[], bool], before: Before) -> None:
        self.has_lease = has_lease
        self.dead_at_s: float | None = None
        self.last_read_s = -1e9
        self._hypervisor = hypervisor
        self._before = before

    async def read(self) -> VmsReading:
        """Return all VMs."""
        fault = await self._before("read VMs")
        self.last_read_s = self._hypervisor.now_s()
        if fault is not Fault.NONE or not self._hypervisor.is_reachable:
            return VmsUnknown("HypervisorUnknown", "no answer")
        self._hypervisor.unread.clear()
        return self._hypervisor.reading()

    async def call(self, call: Call) -> Answer:
        """Make one call."""
        hypervisor = self._hypervisor
        if not self.has_lease():
            hypervisor.on_violation(f"call without the lease: {call}")
        if call.vm in hypervisor.unread:
            hypervisor.on_violation(f"repeated unread: {call}")
        if hypervisor.has_others_call(self):
            hypervisor.on_violation(f"a call while that of an older controller is under way: {call}")
        try:
            fault = await self._before(f"call {call.action} {call.vm}")
        except BaseException:
            hypervisor.late.append(Late(hypervisor.now_s() + DYING_S, call, self, was_given_up=False))
            raise
        if self.dead_at_s is not None and self.dead_at_s <= hypervisor.now_s():
            return OutcomeUnknown("HypervisorUnknown", "the connection is closed")
        if fault is Fault.REFUSED:
            return Refused("CallRefused", "an internal error")
        if fault is Fault.LOST_REQUEST or not hypervisor.is_reachable:
            return OutcomeUnknown("HypervisorUnknown", "the connection broke")
        if fault is Fault.LATE:
            hypervisor.late.append(Late(hypervisor.now_s() + LATE_S, call, self))
            hypervisor.unread.add(call.vm)
            return OutcomeUnknown("HypervisorUnknown", "no answer came in time")
        answer = hypervisor.carry_out(call, self)
        await self._before(f"answer {call.action} {call.vm}")
        if fault is Fault.LOST_ANSWER:
            hypervisor.unread.add(call.vm)
            return OutcomeUnknown("HypervisorUnknown", "the connection broke")
        return answer

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with VMs: all but the suspension of those that can't be."""
        hypervisor = self._hypervisor
        if not hypervisor.is_reachable:
            return VmsUnknown("HypervisorUnreachable", "no answer")
        return {key: hypervisor.abilities(key) for key in vms if key in hypervisor.vms}

    async def close(self) -> None:
        """Die: nothing is delivered from now on."""
        if self.dead_at_s is None:
            self.dead_at_s = self._hypervisor.now_s()

"""The guards of a transition, each with what its removal makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from gpuvirt.model.workers.hypervisor import Action, Power, VmKey, VmsReading, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import WorkerNode
from gpuvirt.model.workers.spec import WorkerProfile
from gpuvirt.model.workers.status import Worker
from gpuvirt_schedules.controller import rounds
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.decide import matching, nextstep, transition, vmstops, workers
from gpuvirt_schedules.decide.nextstep import ScheduleContext


@dataclass(frozen=True, slots=True)
class Patch:
    """A name of a module or a class, and what stands there once the guard is removed."""

    place: object
    name: str
    without: object


async def _unknown_as_off(calls: VmCalls) -> VmsReading:
    """Let a VM that could not be read count as off."""
    reading = await READ(calls)
    if not isinstance(reading, VmsUnknown):
        LATEST[id(calls)] = calls, reading
        return reading
    known = LATEST[id(calls)][1] if id(calls) in LATEST else {}
    return {key: replace(vm, power=Power.OFF) for key, vm in known.items()}


async def _read_once(calls: VmCalls) -> VmsReading:
    """Read only the first time: what a call of unknown outcome has done is never seen."""
    if id(calls) not in LATEST:
        reading = await READ(calls)
        if isinstance(reading, VmsUnknown):
            return reading
        LATEST[id(calls)] = calls, reading
    return LATEST[id(calls)][1]


async def _stay_open(calls: VmCalls) -> None:
    """Leave the connection open whose call may still be delivered."""
    del calls


def _by_name(node: WorkerNode, vms: Mapping[VmKey, WorkerVm]) -> tuple[WorkerVm, ...]:
    return tuple(vm for vm in reversed(list(vms.values())) if vm.name == node.name)[:1]


def _once_asked(worker: Worker, vm: WorkerVm, profile: WorkerProfile, around: ScheduleContext) -> bool:
    """Take a type for set once a call to set it was made."""
    last = around.observed.calls.get(worker.vm)
    return IS_TYPE_READ(worker, vm, profile, around) or (last is not None and last.action is Action.SET_VGPU_TYPE)


def _untyped(worker: Worker) -> Worker:
    """Forget the types of a worker whose Node was deleted."""
    return replace(worker, node_uid="", types=())


READ = VmCalls.read
IS_TYPE_READ = nextstep.is_type_read
LATEST: dict[int, tuple[VmCalls, Mapping[VmKey, WorkerVm]]] = {}
"""The latest readings. They keep their connections, so that no other one gets the same id."""

REMOVALS: Mapping[str, tuple[Patch, ...]] = {
    "lease before a call": (Patch(VmCalls, "is_leader", lambda calls: True),),
    "reading after an unknown outcome": (Patch(VmCalls, "read", _read_once),),
    "closing after an unknown outcome": (Patch(VmCalls, "close", _stay_open),),
    "older connections are dead": (Patch(VmCalls, "alone_in_s", property(lambda calls: 0.0)),),
    "pods gone": (Patch(workers, "pods_left", lambda pods: ()),),
    "cordon before eviction": (Patch(workers, "is_cordoned", lambda node: True),),
    "what kubectl drain leaves": (Patch(workers, "blockers", lambda pods, drain: ()),),
    "vGPU seen free": (Patch(workers, "is_gpu_free", lambda around: True),),
    "match of VM and Node": (
        Patch(matching, "candidates", _by_name),
        Patch(matching, "is_consistent", lambda node, vm: True),
        Patch(matching, "is_same", lambda node, vm: True),
    ),
    "new heartbeat": (
        Patch(workers, "is_alive", lambda worker, node: node.is_ready),
        Patch(workers, "is_alive", lambda worker, node: node.is_ready),
    ),
    "admin's cordon": (Patch(workers, "is_cordon_of", lambda node, mine: node.is_unschedulable),),
    "unknown is not off": (Patch(VmCalls, "read", _unknown_as_off),),
}

PROFILE_REMOVALS: Mapping[str, tuple[Patch, ...]] = {
    "VM confirmed off before another type": (Patch(workers, "is_confirmed_off", lambda vm: True),),
    "type read back before a start": (Patch(workers, "is_type_read", _once_asked),),
    "other types confirmed off before a start": (
        Patch(transition, "is_changing_type", lambda worker, profile, vms: False),
    ),
    "no suspension with a type that changes": (Patch(workers, "keeps_type", lambda worker, vm: True),),
    "labels with the uncordon": (Patch(workers, "label_changes", lambda schedule, worker, node, phase: ()),),
    "types of a missing Node": (Patch(workers, "without_node", _untyped),),
}
"""The guards of a change of vGPU types, noticed in a world with profiles."""


LAG_REMOVALS: Mapping[str, tuple[Patch, ...]] = {
    "no time before the last switch": (Patch(rounds, "not_before_switch", lambda now, last_switch: now),),
}
"""The guard against clocks that lag, noticed in a world with such clocks."""

VM_REMOVALS: Mapping[str, tuple[Patch, ...]] = {
    "all VMs of a GPU or none": (Patch(vmstops, "_may_stop", lambda gpu, waits: True),),
    "other users of a GPU": (Patch(vmstops, "_may_stop", lambda gpu, waits: not any(waits.values())),),
    "budgets of VMs": (Patch(vmstops, "_budget", lambda seen, used, around, known: None),),
    "budgets settle": (Patch(vmstops, "_is_settling", lambda vm, now: False),),
    "unknown VMs stay": (Patch(vmstops, "_observed", lambda vm, ctx: ctx.observed.vms.get(vm.vm)),),
}
"""The guards of VMs that are stopped for a vGPU config, noticed in a world with such VMs."""

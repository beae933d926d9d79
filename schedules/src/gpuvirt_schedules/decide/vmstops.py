"""The stop of VMs on nodes with GPUs of their own for a phase's vGPU config, and their start when the phase ends.

The VMs of a GPU are stopped together or not at all: if one user of the GPU stays, the GPU keeps its vGPUs, and the
other VMs would be off for nothing. A VM is in the status before it is stopped, so that it is started again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.model.reasons import Reason, ReasonCode, without_code
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Accepted, Action, Call, OutcomeUnknown, VmKey
from gpuvirt.model.workers.observed import BlockedGpu, ChangeVm, NodeVm, ObservedVm, ObservedVms, VmStep, elapsed_s
from gpuvirt.model.workers.spec import OnTimeout, Phase, Schedule, VmPolicy
from gpuvirt.model.workers.status import ScheduleStatus
from gpuvirt_schedules.decide.matching import prove_user
from gpuvirt_schedules.decide.nextstep import CALL_AGAIN_S, HELD_AGAIN_S

DEADLINE_S = 600.0
"""How long a VM may take to end, or to start."""
BUDGET_SETTLES_S = 10.0
"""How long after a VM was confirmed off its budgets may still count it."""
LATE_S = 60.0
"""How long after a call without an answer it may still take effect: the API server ends requests after a minute."""
CHANGING_ROUND_S = 1.0
WAITING_ROUND_S = 5.0


class NextVms(msgspec.Struct, frozen=True):
    """The result of one round: the VMs to write into the status, and the actions to take then."""

    vms: tuple[NodeVm, ...] = ()
    actions: tuple[ChangeVm, ...] = ()


class _VmContext(msgspec.Struct, frozen=True):
    schedule: Schedule
    phase: Phase
    observed: ObservedVms
    now: datetime
    due: Mapping[VmKey, NodeVm] = msgspec.field(default_factory=dict)
    """The VMs that the current phase stops, or waits for."""

    def elapsed_s(self, since: datetime) -> float:
        """Return how long a step has taken while this leader made rounds."""
        return elapsed_s(since, self.now, self.observed.rounds_since)


def next_vms(
    schedule: Schedule, phase: Phase, before: tuple[NodeVm, ...], observed: ObservedVms, now: datetime
) -> NextVms:
    """Return the next status of the VMs, and the actions that follow; `phase` is the current one."""
    ctx = _VmContext(schedule, phase, observed, now)
    ctx = replace(ctx, due=_due(ctx, {vm.vm: vm for vm in before if vm.phase == phase.name}))
    found, actions = list[NodeVm](), list[ChangeVm]()
    ended = {vm.vm: vm for vm in before if vm.phase != phase.name or vm.step is VmStep.START}
    for vm in ended.values():
        after, action = _starting(vm, ctx)
        found += [after] if after is not None else []
        actions += [action] if action is not None else []
    begun = {vm.vm: vm for vm in before if vm.vm not in ended and vm.step is not VmStep.WAIT}
    for vm in begun.values():
        after, action = _stopping(vm, ctx)
        found += [after] if after is not None else []
        actions += [action] if action is not None else []
    # A VM of a phase that has ended is started first. One that is new is stopped in the next round, by another reading.
    found += [vm for key, vm in ctx.due.items() if key not in ended and key not in begun]
    return NextVms(tuple(sorted(found, key=lambda vm: (vm.namespace, vm.name, vm.vm))), tuple(actions))


def round_s(schedule: Schedule, phase: Phase | None, status: ScheduleStatus) -> float | None:
    """Return the time until the VMs of a status need another round; None if they need none."""
    if schedule.is_suspended or phase is None:
        return None
    pending = [vm for vm in status.vms if vm.phase != phase.name or vm.step is not VmStep.STOPPED]
    if any(vm.step is not VmStep.WAIT and not vm.is_held for vm in pending):
        return CHANGING_ROUND_S
    waits = phase.vms is VmPolicy.STOP and any(is_in_use(node.reason) for node in status.nodes)
    return WAITING_ROUND_S if pending or waits else None


def is_in_use(reason: Reason | None) -> bool:
    """Return whether a node waits for users of its vGPUs, by its agent's report of the newest spec."""
    return reason is not None and reason.code is ReasonCode.VGPU_IN_USE


def _due(ctx: _VmContext, known: Mapping[VmKey, NodeVm]) -> Mapping[VmKey, NodeVm]:
    """Return the VMs of GPUs that wait for them: in step Stop if they may be stopped now, else in step Wait."""
    if ctx.phase.vms is not VmPolicy.STOP:
        return {}
    found, used = dict[VmKey, NodeVm](), Counter[str]()
    for gpu in ctx.observed.gpus:
        waits = dict(_waits(gpu, ctx, known, used))
        for key in gpu.vms:
            last = found.get(key)
            if last is not None and last.step is VmStep.STOP:
                continue
            found[key] = _due_vm(gpu, key, ctx, known.get(key), waits)
            if _may_stop(gpu, waits):
                used.update(ctx.observed.vms[key].budgets.keys())
    return found


def _due_vm(
    gpu: BlockedGpu, key: VmKey, ctx: _VmContext, known: NodeVm | None, waits: Mapping[VmKey, Reason | None]
) -> NodeVm:
    """Return a VM of a GPU with its step."""
    observed, may_stop = ctx.observed.vms[key], _may_stop(gpu, waits)
    step = VmStep.STOP if may_stop else VmStep.WAIT
    since = known.since if known is not None and known.step is step else ctx.now
    reason = reasons.vm_pending(observed.where, step)
    if not may_stop:
        staying = [ctx.observed.vms[other].where for other, why in waits.items() if why is not None and other != key]
        reason = waits[key] or reasons.vm_not_stopped(
            observed.where,
            f"other users of its GPU on node {gpu.node} stay: {', '.join((*gpu.others, *staying))}",
            "stop those users, or see what they wait for; then all VMs of the GPU are stopped",
        )
    has_begun = known is not None and known.step is not VmStep.WAIT
    is_forced = may_stop and not has_begun and any(count <= 0 for count in observed.budgets.values())
    return NodeVm(
        key,
        observed.namespace,
        observed.name,
        gpu.node,
        ctx.phase.name,
        step,
        since,
        is_forced=is_forced,
        reason=reason,
    )


def _may_stop(gpu: BlockedGpu, waits: Mapping[VmKey, Reason | None]) -> bool:
    """Return whether all users of a GPU are VMs that may be stopped, or are being stopped."""
    return not gpu.others and not any(waits.values())


def _waits(
    gpu: BlockedGpu, ctx: _VmContext, known: Mapping[VmKey, NodeVm], used: Counter[str]
) -> Iterator[tuple[VmKey, Reason | None]]:
    """Yield the VMs of a GPU, each with why it is not stopped now; None if it may be, or is being stopped."""
    used = Counter(used)
    for key in gpu.vms:
        observed, last = ctx.observed.vms[key], known.get(key)
        if last is not None and last.step is VmStep.STOP:
            yield key, None
            continue
        why = _keeps(observed, last)
        if why is None and not _is_late(last, ctx):
            why = _budget(observed, used, ctx, known)
        used.update(observed.budgets.keys())
        yield key, why


def _keeps(observed: ObservedVm, last: NodeVm | None) -> Reason | None:
    """Return why a VM is not stopped, whatever its budgets say."""
    if last is not None and last.step is VmStep.STOPPED:
        return reasons.vm_not_stopped(observed.where, "an admin has started it in this phase")
    if observed.stop_refusal is not None:
        return observed.stop_refusal
    if observed.start_refusal is not None:
        return reasons.vm_not_stopped(observed.where, f"it could not be started again: {observed.start_refusal.text}")
    if observed.is_changing or not observed.is_on:
        return reasons.vm_not_stopped(observed.where, "KubeVirt is still carrying out another change of it")
    return None


def _is_late(last: NodeVm | None, ctx: _VmContext) -> bool:
    """Return whether a VM has waited so long that `onTimeout: Force` takes no budget for a reason."""
    drain = ctx.schedule.drain
    if last is None or last.step is not VmStep.WAIT or last.since is None:
        return False
    return drain.on_timeout is OnTimeout.FORCE and ctx.elapsed_s(last.since) >= drain.timeout_s


def _budget(observed: ObservedVm, used: Counter[str], ctx: _VmContext, known: Mapping[VmKey, NodeVm]) -> Reason | None:
    """Return the budget that keeps a VM; one that has just allowed a stop may not count that VM yet."""
    for name, allowed in sorted(observed.budgets.items()):
        if allowed - used[name] <= 0:
            return reasons.vm_budget(observed.where, name)
        if any(_is_settling(vm, ctx.now) for vm in known.values()):
            return reasons.vm_not_stopped(
                observed.where,
                f"PodDisruptionBudget {name} may not count a VM yet that was just stopped",
                "wait for some seconds",
            )
    return None


def _is_settling(vm: NodeVm, now: datetime) -> bool:
    if vm.step is VmStep.STOP:
        return True
    return vm.step is VmStep.STOPPED and vm.since is not None and (now - vm.since).total_seconds() < BUDGET_SETTLES_S


def _stopping(vm: NodeVm, ctx: _VmContext) -> tuple[NodeVm | None, ChangeVm | None]:
    """Return a VM that the current phase stops, or has stopped; None once it is no longer the schedule's."""
    observed = _observed(vm, ctx)
    if not isinstance(observed, ObservedVm):
        return (replace(vm, reason=observed), None) if observed is not None else (None, None)
    due = ctx.due.get(vm.vm)
    if vm.step is not VmStep.STOP:
        return replace(vm, reason=due.reason if due is not None else None), None
    if not observed.is_on and not observed.is_changing:
        return replace(vm, step=VmStep.STOPPED, since=ctx.now, is_held=False, reason=None), None
    if observed.is_changing:
        return _timed(vm, ctx), None
    if due is None or due.step is not VmStep.STOP:
        return (None if _is_certain(vm, ctx) else vm), None  # it runs, and must not be stopped any more
    return _called(vm, observed, Action.SHUT_DOWN, ctx)


def _starting(vm: NodeVm, ctx: _VmContext) -> tuple[NodeVm | None, ChangeVm | None]:
    """Return a VM whose phase has ended; None once it runs, or is an admin's."""
    if vm.step is VmStep.WAIT:
        return None, None
    if vm.step is not VmStep.START:
        vm = replace(vm, step=VmStep.START, since=ctx.now, is_held=False)
    observed = _observed(vm, ctx)
    if not isinstance(observed, ObservedVm):
        return (replace(vm, reason=observed), None) if observed is not None else (None, None)
    if observed.is_on and not observed.is_halted and not observed.is_changing:
        reason = reasons.vm_pending(vm.where, vm.step)
        return (None if _is_certain(vm, ctx) else replace(vm, is_held=False, reason=reason)), None
    if observed.is_changing:
        return _timed(vm, ctx), None
    return _started(vm, observed, ctx)


def _started(vm: NodeVm, observed: ObservedVm, ctx: _VmContext) -> tuple[NodeVm | None, ChangeVm | None]:
    """Return a VM that is off, and is to be started."""
    if vm.phase == ctx.phase.name:  # the phase has begun again before the VM was started
        return replace(vm, step=VmStep.STOPPED, since=ctx.now, is_held=False, reason=None), None
    if observed.start_refusal is not None:
        return None, None  # an admin has changed how it is started
    return _called(vm, observed, Action.START, ctx)


def _is_certain(vm: NodeVm, ctx: _VmContext) -> bool:
    """Return whether no call for a VM can take effect any more, also none of a controller that has died."""
    last = ctx.observed.calls.get(vm.vm)
    age_s = ctx.elapsed_s(vm.since) if vm.since is not None else 0.0
    return age_s >= LATE_S and (last is None or last.age_s >= LATE_S)


def _observed(vm: NodeVm, ctx: _VmContext) -> ObservedVm | Reason | None:
    """Return what is seen of a VM; a Reason if that is unknown, None if the VM does not exist any more."""
    unknown = ctx.observed.unknown.get(vm.namespace)
    return unknown if unknown is not None else ctx.observed.vms.get(vm.vm)


def _timed(vm: NodeVm, ctx: _VmContext) -> NodeVm:
    """Return a VM in a step that goes on; a step that was held stays held, also when another controller leads."""
    since = min(vm.since, ctx.now) if vm.since is not None else ctx.now
    is_held = vm.is_held or ctx.elapsed_s(since) >= DEADLINE_S
    return replace(vm, since=since, is_held=is_held, reason=reasons.vm_pending(vm.where, vm.step))


def _called(vm: NodeVm, observed: ObservedVm, action: Action, ctx: _VmContext) -> tuple[NodeVm, ChangeVm | None]:
    """Return a VM with the call that brings it further, which is not made again while it may take effect."""
    vm, last = _timed(vm, ctx), ctx.observed.calls.get(vm.vm)
    if last is not None and last.action is action:
        if not isinstance(last.answer, Accepted):
            vm = replace(
                vm,
                reason=Reason(
                    ReasonCode.named(last.answer.code) or ReasonCode.CALL_REFUSED,
                    f"VM {vm.where}",
                    f"stays as it is, since KubeVirt refuses: {without_code(last.answer.code, last.answer.text)}",
                ),
            )
        again_s = HELD_AGAIN_S if vm.is_held else 0.0 if isinstance(last.answer, OutcomeUnknown) else CALL_AGAIN_S
        if last.age_s < again_s:
            return vm, None
    proof = prove_user(vm, observed)
    return vm, ChangeVm(vm.namespace, vm.name, Call(proof, action)) if proof is not None else None

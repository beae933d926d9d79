"""One round's decisions about VMs whose vGPUs a phase's vGPU config removes: what each observation leads to."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.reasons import schedules as schedulereasons
from gpuvirt.model.workers.hypervisor import Accepted, Action, Answer, OutcomeUnknown, Refused, VmKey
from gpuvirt.model.workers.observed import BlockedGpu, LastCall, NodeVm, ObservedVm, ObservedVms, VmStep
from gpuvirt.model.workers.spec import Drain, OnTimeout, Phase, PhaseName, Schedule, VmPolicy
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus
from gpuvirt_schedules.decide.vmstops import BUDGET_SETTLES_S, DEADLINE_S, LATE_S, NextVms, next_vms, round_s

DAY, NIGHT, NODE = PhaseName("day"), PhaseName("night"), NodeName("bare01")
EVENING = datetime(2026, 1, 5, 20, 0, 5, tzinfo=UTC)
CERTAIN = EVENING + timedelta(seconds=LATE_S)
OF_DAY, OF_NIGHT = (Phase(name, "0 7 * * *", vgpu_config="c", vms=VmPolicy.STOP) for name in (DAY, NIGHT))
SCHEDULE = Schedule("gpus", "UTC", (OF_DAY, OF_NIGHT), drain=Drain(60.0), generation=1)
A, B = VmKey("a"), VmKey("b")
ON = ObservedVm(A, "vms", "a", is_on=True)
ALSO_ON = ObservedVm(B, "vms", "b", is_on=True)
OFF = replace(ON, is_on=False, is_halted=True)
ENDING = replace(ON, is_changing=True, is_halted=True)
BLOCKED = BlockedGpu(NODE, "0000:65:00.0", (A,))
BOTH = replace(BLOCKED, vms=(A, B))
STOP = NodeVm(A, "vms", "a", NODE, NIGHT, VmStep.STOP, EVENING)
STOPPED = replace(STOP, step=VmStep.STOPPED, since=EVENING - timedelta(hours=1))
REFUSAL = reasons.vm_not_stopped("vms/b", "a VirtualMachinePool controls it")


def seen(*vms: ObservedVm, gpus: tuple[BlockedGpu, ...] = (BLOCKED,), last: LastCall | None = None) -> ObservedVms:
    return ObservedVms({vm.vm: vm for vm in vms}, {}, gpus, {A: last} if last is not None else {})


def decided(observed: ObservedVms, *before: NodeVm, at: datetime = EVENING, phase: Phase = OF_NIGHT,
            schedule: Schedule = SCHEDULE) -> NextVms:  # fmt: skip
    return next_vms(schedule, phase, before, observed, at)


def steps(found: NextVms) -> dict[str, VmStep]:
    return {vm.name: vm.step for vm in found.vms}


def calls(found: NextVms) -> list[tuple[str, Action]]:
    return [(action.name, action.call.action) for action in found.actions]


def test_a_vm_is_in_the_status_before_it_is_stopped() -> None:
    first = decided(seen(ON))
    assert (steps(first), calls(first)) == ({"a": VmStep.STOP}, [])
    second = decided(seen(ON), *first.vms)
    assert (steps(second), calls(second)) == ({"a": VmStep.STOP}, [("a", Action.SHUT_DOWN)])
    ending = decided(seen(ENDING), *second.vms)
    assert (steps(ending), calls(ending)) == ({"a": VmStep.STOP}, [])
    off = decided(seen(OFF, gpus=()), *ending.vms)
    assert (steps(off), calls(off)) == ({"a": VmStep.STOPPED}, [])
    assert decided(seen(OFF, gpus=()), *off.vms).vms == off.vms


def test_a_vm_is_started_once_the_phase_that_stopped_it_ends() -> None:
    starts = decided(seen(OFF, gpus=()), STOPPED, phase=OF_DAY)
    assert (steps(starts), calls(starts)) == ({"a": VmStep.START}, [("a", Action.START)])
    starting = replace(ON, is_changing=True)
    assert steps(decided(seen(starting, gpus=()), *starts.vms, phase=OF_DAY)) == {"a": VmStep.START}
    assert steps(decided(seen(ON, gpus=()), *starts.vms, phase=OF_DAY)) == {"a": VmStep.START}
    assert decided(seen(ON, gpus=()), *starts.vms, at=CERTAIN, phase=OF_DAY) == NextVms()


def test_a_vm_whose_phase_begins_again_before_it_was_started_stays_off() -> None:
    start = replace(STOPPED, step=VmStep.START)
    assert steps(decided(seen(OFF, gpus=()), start)) == {"a": VmStep.STOPPED}
    assert not decided(seen(OFF, gpus=()), start).actions
    assert steps(decided(seen(ON), start)) == {}, "it runs, and is stopped again by the next round"


@pytest.mark.parametrize("step", [VmStep.STOP, VmStep.STOPPED, VmStep.START])
def test_a_vm_that_still_ends_is_started_after_that(step: VmStep) -> None:
    """Also a VM whose stop began at the very end of the phase."""
    found = decided(seen(ENDING, gpus=()), replace(STOP, step=step), phase=OF_DAY)
    assert (steps(found), calls(found)) == ({"a": VmStep.START}, [])


def test_a_vm_is_not_stopped_for_the_next_phase_before_it_was_started() -> None:
    assert steps(decided(seen(ON), STOPPED, phase=OF_DAY)) == {"a": VmStep.START}
    assert steps(decided(seen(replace(ON, is_changing=True)), STOPPED, phase=OF_DAY)) == {"a": VmStep.START}


def test_a_phase_that_waits_stops_nothing_and_what_was_stopped_comes_back() -> None:
    waits = replace(OF_NIGHT, vms=VmPolicy.WAIT)
    assert decided(seen(ON), phase=waits) == NextVms()
    assert decided(seen(ON), STOP, phase=waits, at=CERTAIN) == NextVms(), "it was not stopped yet"
    assert steps(decided(seen(OFF, gpus=()), STOPPED, phase=waits)) == {"a": VmStep.STOPPED}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stop_refusal": REFUSAL}, "a VirtualMachinePool controls it"),
        ({"start_refusal": REFUSAL}, "could not be started again"),
        ({"is_changing": True}, "another change"),
        ({"is_on": False}, "another change"),
        ({"budgets": {"vms/pdb": 0}}, "PodDisruptionBudget vms/pdb allows no further"),
    ],
)
def test_no_vm_of_a_gpu_is_stopped_while_one_of_them_stays(change: dict[str, object], words: str) -> None:
    second = replace(ALSO_ON, **change)
    found = decided(seen(ON, second, gpus=(BOTH,)))
    again = decided(seen(ON, second, gpus=(BOTH,)), *found.vms)
    assert (steps(again), calls(again)) == ({"a": VmStep.WAIT, "b": VmStep.WAIT}, [])
    first, other = again.vms
    assert first.reason is not None
    assert other.reason is not None
    assert "other users of its GPU on node bare01 stay: vms/b" in first.reason.text
    assert words in other.reason.text
    assert {first.reason.code, other.reason.code} == {ReasonCode.VM_NOT_STOPPED}


def test_no_vm_is_stopped_while_its_gpu_has_another_user() -> None:
    found = decided(seen(ON, gpus=(replace(BLOCKED, others=("pod default/train-0",)),)))
    (vm,) = found.vms
    assert vm.step is VmStep.WAIT
    assert vm.reason is not None
    assert "pod default/train-0" in vm.reason.text


def test_a_budget_is_counted_for_all_vms_of_a_round() -> None:
    """After one stop it would allow no other, so that the first VM would be off for nothing."""
    budgets = {"vms/pdb": 1}
    pair = (replace(ON, budgets=budgets), replace(ALSO_ON, budgets=budgets))
    assert steps(decided(seen(*pair, gpus=(BOTH,)))) == {"a": VmStep.WAIT, "b": VmStep.WAIT}
    apart = (BLOCKED, replace(BLOCKED, address="0000:66:00.0", vms=(B,)))
    assert steps(decided(seen(*pair, gpus=apart))) == {"a": VmStep.STOP, "b": VmStep.WAIT}
    enough = tuple(replace(vm, budgets={"vms/pdb": 2}) for vm in pair)
    assert steps(decided(seen(*enough, gpus=(BOTH,)))) == {"a": VmStep.STOP, "b": VmStep.STOP}


def test_a_budget_that_has_just_allowed_a_stop_settles_first() -> None:
    second = replace(ALSO_ON, budgets={"vms/pdb": 1})
    gpus = (replace(BLOCKED, vms=(B,)),)
    assert steps(decided(seen(ENDING, second, gpus=gpus), STOP)) == {"a": VmStep.STOP, "b": VmStep.WAIT}
    off = replace(STOPPED, since=EVENING)
    assert steps(decided(seen(OFF, second, gpus=gpus), off))["b"] is VmStep.WAIT
    later = EVENING + timedelta(seconds=BUDGET_SETTLES_S)
    assert steps(decided(seen(OFF, second, gpus=gpus), off, at=later))["b"] is VmStep.STOP
    assert steps(decided(seen(OFF, ALSO_ON, gpus=gpus), off))["b"] is VmStep.STOP, "it has no budget"


@pytest.mark.parametrize("on_timeout", OnTimeout)
def test_a_budget_is_broken_by_force_alone_and_not_before_the_timeout(on_timeout: OnTimeout) -> None:
    schedule = replace(SCHEDULE, drain=Drain(60.0, on_timeout))
    covered = seen(replace(ON, budgets={"vms/pdb": 0}))
    first = decided(covered, schedule=schedule)
    early = decided(covered, *first.vms, at=EVENING + timedelta(seconds=59), schedule=schedule)
    late = decided(covered, *early.vms, at=EVENING + timedelta(seconds=60), schedule=schedule)
    assert steps(early) == {"a": VmStep.WAIT}
    is_forced = on_timeout is OnTimeout.FORCE
    assert [(vm.step, vm.is_forced) for vm in late.vms] == [(VmStep.STOP if is_forced else VmStep.WAIT, is_forced)]
    if is_forced:
        after = decided(covered, *late.vms, at=EVENING + timedelta(seconds=61), schedule=schedule)
        assert (calls(after), after.vms[0].is_forced) == ([("a", Action.SHUT_DOWN)], True)


def test_force_breaks_nothing_but_budgets() -> None:
    schedule = replace(SCHEDULE, drain=Drain(60.0, OnTimeout.FORCE))
    refused = seen(replace(ON, stop_refusal=REFUSAL))
    first = decided(refused, schedule=schedule)
    assert steps(decided(refused, *first.vms, at=EVENING + timedelta(hours=1), schedule=schedule)) == {"a": VmStep.WAIT}


def test_a_vm_that_an_admin_starts_is_left_alone_until_the_phase_ends() -> None:
    first = decided(seen(ON), STOPPED)
    again = decided(seen(ON), *first.vms)
    assert (steps(again), calls(again)) == ({"a": VmStep.STOPPED}, [])
    (vm,) = again.vms
    assert vm.reason is not None
    assert "an admin has started it" in vm.reason.text
    assert not decided(seen(ON), *again.vms, phase=OF_DAY).actions


def test_a_vm_whose_start_an_admin_has_changed_is_the_admin_s() -> None:
    assert decided(seen(replace(OFF, start_refusal=REFUSAL), gpus=()), STOPPED, phase=OF_DAY) == NextVms()


@pytest.mark.parametrize("phase", [OF_DAY, OF_NIGHT])
@pytest.mark.parametrize("step", [VmStep.STOP, VmStep.STOPPED])
def test_a_vm_that_is_unknown_stays_in_the_status(phase: Phase, step: VmStep) -> None:
    unknown = schedulereasons.hypervisor_unknown("HypervisorForbidden", "forbidden")
    found = decided(ObservedVms(unknown={"vms": unknown}), replace(STOP, step=step), phase=phase)
    assert [(vm.vm, vm.reason) for vm in found.vms] == [(A, unknown)]
    assert not found.actions
    assert decided(ObservedVms(), replace(STOP, step=step), phase=phase) == NextVms(), "it was deleted"


def test_a_vm_that_runs_and_need_not_go_any_more_is_not_stopped() -> None:
    """The users of its GPU, or the node's vGPU config, have changed since the status was written."""
    shared = (replace(BLOCKED, others=("pod default/train-0",)),)
    for gpus in ((), shared):
        assert decided(seen(ON, gpus=gpus), STOP) == NextVms((STOP,)), "a call of another leader may still arrive"
        last = LastCall(Action.SHUT_DOWN, OutcomeUnknown("HypervisorCallFailed", "broke"), 59.0)
        assert decided(seen(ON, gpus=gpus, last=last), STOP, at=CERTAIN) == NextVms((STOP,)), "as may an own one"
    assert decided(seen(ON, gpus=()), STOP, at=CERTAIN) == NextVms()
    assert steps(decided(seen(ON, gpus=shared), STOP, at=CERTAIN)) == {}


@pytest.mark.parametrize(
    ("answer", "age_s", "code", "again"),
    [
        (Accepted(), 1.0, "StepPending", False),
        (Accepted(), 21.0, "StepPending", True),
        (Refused("WrongPowerState", "changed"), 1.0, "WrongPowerState", False),
        (Refused("WrongPowerState", "changed"), 21.0, "WrongPowerState", True),
        (OutcomeUnknown("HypervisorCallFailed", "broke"), 1.0, "HypervisorCallFailed", True),
    ],
)
def test_a_call_is_repeated_in_time(answer: Answer, age_s: float, code: str, *, again: bool) -> None:
    found = decided(seen(ON, last=LastCall(Action.SHUT_DOWN, answer, age_s)), STOP)
    (vm,) = found.vms
    assert vm.reason is not None
    assert (str(vm.reason.code), bool(found.actions)) == (code, again)


@pytest.mark.parametrize("answer", [Accepted(), OutcomeUnknown("HypervisorCallFailed", "broke")])
def test_a_step_that_takes_too_long_is_held_and_tried_again_every_half_minute(answer: Answer) -> None:
    late = EVENING + timedelta(seconds=DEADLINE_S)
    held = decided(seen(ON), STOP, at=late)
    assert ([vm.is_held for vm in held.vms], bool(held.actions)) == ([True], True)
    assert [vm.is_held for vm in decided(seen(ON), STOP, at=late - timedelta(seconds=1)).vms] == [False]
    for age_s in (29.0, 30.0):
        again = decided(seen(ON, last=LastCall(Action.SHUT_DOWN, answer, age_s)), *held.vms, at=late)
        assert (again.vms[0].is_held, bool(again.actions)) == (True, age_s == 30.0)
    off = decided(seen(OFF, gpus=()), *held.vms, at=late)
    assert [(vm.step, vm.is_held) for vm in off.vms] == [(VmStep.STOPPED, False)]
    starts = decided(seen(OFF, gpus=()), *held.vms, at=late, phase=OF_DAY)
    assert starts.actions, "another phase ends the hold"


def test_the_deadline_of_a_vm_counts_from_the_first_round_of_the_leader() -> None:
    taken_over = EVENING + timedelta(hours=1)
    begins = replace(seen(ON), rounds_since=taken_over)
    found = decided(begins, STOP, at=taken_over)
    assert (found.vms[0].is_held, found.vms[0].since, calls(found)) == (False, EVENING, [("a", Action.SHUT_DOWN)])
    late = taken_over + timedelta(seconds=DEADLINE_S)
    assert not decided(begins, *found.vms, at=late - timedelta(seconds=1)).vms[0].is_held
    held = decided(begins, *found.vms, at=late)
    assert held.vms[0].is_held
    again = decided(replace(begins, rounds_since=late), *held.vms, at=late)
    assert again.vms[0].is_held, "another leader lifts no hold"
    own = replace(begins, rounds_since=EVENING - timedelta(seconds=1))
    assert decided(own, STOP, at=EVENING + timedelta(seconds=DEADLINE_S)).vms[0].is_held


def test_a_vm_is_stopped_against_its_budget_only_after_the_whole_timeout_of_one_leader() -> None:
    forced = replace(SCHEDULE, drain=Drain(60.0, OnTimeout.FORCE))
    covered = seen(replace(ON, budgets={"vms/pdb": 0}))
    waits, taken_over = decided(covered, schedule=forced).vms, EVENING + timedelta(hours=1)
    for since, seconds, step in ((None, 0, VmStep.STOP), (taken_over, 0, VmStep.WAIT), (taken_over, 59, VmStep.WAIT),
                                 (taken_over, 60, VmStep.STOP)):  # fmt: skip
        at = taken_over + timedelta(seconds=seconds)
        assert steps(decided(replace(covered, rounds_since=since), *waits, at=at, schedule=forced)) == {"a": step}


def test_calls_of_the_controller_before_may_still_arrive_in_the_first_minute_of_a_leader() -> None:
    taken_over = EVENING + timedelta(hours=1)
    found = replace(seen(ON, gpus=()), rounds_since=taken_over)
    assert decided(found, STOP, at=taken_over + timedelta(seconds=LATE_S - 1)) == NextVms((STOP,))
    assert decided(found, STOP, at=taken_over + timedelta(seconds=LATE_S)) == NextVms()


def test_rounds_go_on_while_something_is_due() -> None:
    in_use = schedulereasons.vgpu_config_pending(NODE, "c", "used", "VgpuInUse")
    waiting = (ConfiguredNode(NODE, NIGHT, "c", in_use),)
    assert round_s(SCHEDULE, OF_NIGHT, ScheduleStatus()) is None
    assert round_s(SCHEDULE, None, ScheduleStatus(nodes=waiting)) is None
    assert round_s(SCHEDULE, OF_NIGHT, ScheduleStatus(nodes=waiting)) == 5.0
    assert round_s(SCHEDULE, replace(OF_NIGHT, vms=VmPolicy.WAIT), ScheduleStatus(nodes=waiting)) is None
    assert round_s(SCHEDULE, OF_NIGHT, ScheduleStatus(vms=(STOPPED,))) is None
    assert round_s(SCHEDULE, OF_DAY, ScheduleStatus(vms=(STOPPED,))) == 1.0
    assert round_s(SCHEDULE, OF_NIGHT, ScheduleStatus(vms=(STOP,))) == 1.0
    assert round_s(SCHEDULE, OF_NIGHT, ScheduleStatus(vms=(replace(STOP, is_held=True),))) == 5.0
    assert round_s(replace(SCHEDULE, is_suspended=True), OF_NIGHT, ScheduleStatus(vms=(STOP,))) is None

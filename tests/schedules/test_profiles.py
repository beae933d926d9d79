"""A worker whose phase gives its VM another vGPU type is shut down, retyped, started and labelled, in this order."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.hypervisor import Abilities, Ability, Action, Call, Power, VmKey, VmProof, WorkerVm
from gpuvirt.model.workers.observed import ScheduleObservation, WorkerNode
from gpuvirt.model.workers.spec import Phase, PhaseName, Schedule, WorkerProfile
from gpuvirt.model.workers.status import ScheduleStatus, Worker, WorkerStep
from gpuvirt_schedules.decide.faults import faults, missing_profiles
from gpuvirt_schedules.decide.nextstep import CallVm, MarkNode
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance, advance

DAY, NIGHT = PhaseName("day"), PhaseName("night")
SMALL, LARGE = "grid_v100-4q", "grid_v100-16q"
EVENING = datetime(2026, 1, 5, 20, 0, 5, tzinfo=UTC)
NAME, KEY, UUID = NodeName("worker-1"), VmKey("one"), "421c5a83-0000-4000-8000-000000000001"
TYPES = {DAY: SMALL, NIGHT: LARGE}
SCHEDULE = Schedule(
    "gpus",
    "UTC",
    (
        Phase(DAY, "0 7 * * *", (WorkerProfile(SMALL, (("tier", "small"), ("vgpu.type", SMALL))),), ("pool",)),
        Phase(NIGHT, "0 20 * * *", (WorkerProfile(LARGE, (("vgpu.type", LARGE),)),), ("pool",)),
    ),
    generation=1,
)
NODE = WorkerNode(
    NAME,
    "uid-1",
    "7",
    frozenset(TYPES),
    system_uuid=UUID,
    is_ready=True,
    renewal="1",
    types=TYPES,
    labels={"pool": "gpu", "tier": "small", "vgpu.type": SMALL},
)
CORDONED = replace(NODE, is_unschedulable=True, cordoned_by="gpus", cordoned_for_s=60.0)
VM = WorkerVm(KEY, "worker-1", UUID, Power.ON, (SMALL,))
OFF = replace(VM, power=Power.OFF)
SERVING = ScheduleStatus(
    DAY, workers=(Worker(NAME, "uid-1", (DAY, NIGHT), KEY, "worker-1", WorkerStep.SERVING, types=tuple(TYPES.items())),)
)


YES = Ability(True)


def decided(
    node: WorkerNode | None,
    vm: WorkerVm,
    status: ScheduleStatus = SERVING,
    at: datetime = EVENING,
    retype: Ability = YES,
) -> Advance:
    able = {vm.key: Abilities(vm.key, YES, YES, YES, retype)}
    observed = ScheduleObservation({} if node is None else {NAME: node}, {}, {}, {vm.key: vm}, abilities=able)
    return advance(SCHEDULE, timeline_of(SCHEDULE), status, observed, at)


def calls(found: Advance) -> list[Call]:
    return [action.call for action in found.actions if isinstance(action, CallVm)]


def test_a_vm_that_gets_another_type_is_shut_down_never_suspended() -> None:
    assert decided(NODE, VM).actions == (MarkNode(NAME, "7", cordon=True),)
    assert calls(decided(CORDONED, VM)) == [Call(VmProof(KEY), Action.SHUT_DOWN)]


def test_a_type_is_set_once_the_vm_is_off_and_the_vm_started_once_the_type_is_read() -> None:
    assert not calls(decided(CORDONED, replace(VM, is_changing=True)))
    assert calls(decided(CORDONED, OFF)) == [Call(VmProof(KEY), Action.SET_VGPU_TYPE, LARGE)]
    waiting = decided(CORDONED, replace(OFF, is_changing=True))
    assert not calls(waiting)
    assert waiting.status.workers[0].step is WorkerStep.SET_TYPE
    assert calls(decided(CORDONED, replace(OFF, vgpu_types=(LARGE,)))) == [Call(VmProof(KEY), Action.START)]


def test_the_node_gets_the_labels_of_the_type_with_its_uncordon() -> None:
    started = replace(VM, vgpu_types=(LARGE,))
    first = decided(CORDONED, started, decided(CORDONED, replace(OFF, vgpu_types=(LARGE,))).status)
    assert not first.actions
    assert first.status.workers[0].step is WorkerStep.HEARTBEAT
    alive = replace(CORDONED, renewal="2")
    labels = (("tier", None), ("vgpu.type", LARGE))
    again = decided(alive, started, first.status)
    assert again.actions == (MarkNode(NAME, "7", cordon=False, taint=False, labels=labels),)
    assert again.actions[0].text.endswith(f"labels tier-, vgpu.type={LARGE}")
    done = replace(NODE, renewal="3", labels={"pool": "gpu", "vgpu.type": LARGE})
    assert decided(done, started, again.status).status.phase == NIGHT


def test_a_node_that_seems_ready_is_cordoned_before_its_vm_that_is_off_gets_another_type() -> None:
    assert decided(NODE, OFF).actions == (MarkNode(NAME, "7", cordon=True),)


def test_a_worker_waits_until_each_vm_with_another_type_is_off() -> None:
    other, key = NodeName("worker-2"), VmKey("two")
    second = replace(CORDONED, name=other, uid="uid-2", system_uuid=UUID.replace("1", "2"))
    seen = ScheduleObservation(
        {NAME: CORDONED, other: second},
        {},
        {},
        {
            KEY: replace(OFF, vgpu_types=(LARGE,)),
            key: replace(VM, key=key, name="worker-2", system_uuid=second.system_uuid),
        },
    )
    found = advance(SCHEDULE, timeline_of(SCHEDULE), SERVING, seen, EVENING)
    assert calls(found) == [Call(VmProof(key), Action.SHUT_DOWN)]
    assert {worker.node: worker.step for worker in found.status.workers} == {
        NAME: WorkerStep.WAIT_FOR_GPU,
        other: WorkerStep.LEAVE,
    }


def test_a_worker_of_one_phase_is_suspended_with_its_type() -> None:
    node = replace(CORDONED, phases=frozenset({DAY}), types={DAY: SMALL})
    assert calls(decided(node, VM)) == [Call(VmProof(KEY), Action.SUSPEND)]
    assert calls(decided(node, replace(VM, vgpu_types=(LARGE,)))) == [Call(VmProof(KEY), Action.SHUT_DOWN)]


@pytest.mark.parametrize(
    ("vm", "code"),
    [
        (replace(VM, power=Power.SUSPENDED), ReasonCode.SUSPENDED_WITH_TYPE),
        (replace(VM, vgpu_types=(SMALL, SMALL)), ReasonCode.NOT_ONE_VGPU),
        (replace(VM, vgpu_types=()), ReasonCode.NOT_ONE_VGPU),
    ],
)
def test_a_type_that_can_not_be_changed_is_reported_before_anything_happens(vm: WorkerVm, code: ReasonCode) -> None:
    found = decided(NODE, vm)
    reason = found.status.workers[0].reason
    assert not found.actions
    assert reason is not None
    assert reason.code is code
    assert decided(NODE, vm, found.status, EVENING + timedelta(hours=1)).status.held


def test_a_vm_whose_type_the_hypervisor_does_not_change_is_not_drained_for_it() -> None:
    found = decided(NODE, VM, retype=Ability(False, "HypervisorRefused", "a domain keeps its devices"))
    (worker,) = found.status.workers
    assert (found.actions, worker.step, worker.reason and worker.reason.code) == (
        (),
        WorkerStep.CHECK,
        ReasonCode.HYPERVISOR_REFUSED,
    )


def test_a_vm_whose_node_was_deleted_still_gets_the_type_of_its_phase() -> None:
    assert calls(decided(None, OFF)) == [Call(VmProof(KEY), Action.SET_VGPU_TYPE, LARGE)]
    lost = replace(NODE, uid="uid-2", phases=frozenset(), types={}, is_unschedulable=True, labels={})
    found = decided(lost, OFF)
    assert calls(found) == [Call(VmProof(KEY), Action.SET_VGPU_TYPE, LARGE)]


def test_workers_that_get_another_type_are_announced() -> None:
    status = replace(SERVING, generation=1)
    at = EVENING - timedelta(minutes=10)
    assert decided(NODE, VM, status, at).actions == (MarkNode(NAME, "7", taint=True),)
    kept = replace(NODE, types={DAY: SMALL, NIGHT: SMALL})
    assert not decided(kept, VM, replace(status, workers=()), at).actions


@pytest.mark.parametrize(
    ("profiles", "selected_by", "code"),
    [
        ((WorkerProfile(""),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL), WorkerProfile(SMALL)), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("no key!", "x"),)),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("key", "no value!"),)),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("kubernetes.io/hostname", "x"),)),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("node-role.kubernetes.io/gpu", ""),)),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("gpuvirt.io/cordoned-by", "x"),)),), (), ReasonCode.SCHEDULE_INVALID),
        ((WorkerProfile(SMALL, (("pool", "small"),)),), ("pool",), ReasonCode.PROFILE_LABEL_SELECTS),
    ],
)
def test_profiles_that_can_not_be_set_are_faults(
    profiles: tuple[WorkerProfile, ...], selected_by: tuple[str, ...], code: ReasonCode
) -> None:
    phases = (Phase(DAY, "0 7 * * *", profiles), Phase(NIGHT, "0 20 * * *", (), selected_by))
    assert {fault.code for fault in faults(replace(SCHEDULE, phases=phases), EVENING)} == {code}


def test_profiles_of_domains_of_their_own_are_no_faults() -> None:
    labels = (("nvidia.com/vgpu", "x"), ("mykubernetes.io/tier", "small"))
    phases = (Phase(DAY, "0 7 * * *", (WorkerProfile(SMALL, labels),)), Phase(NIGHT, "0 20 * * *"))
    assert faults(replace(SCHEDULE, phases=phases), EVENING) == ()


def test_a_worker_that_one_of_its_phases_gives_no_type_is_a_fault() -> None:
    assert list(missing_profiles([NODE, replace(NODE, types={})])) == []
    (found,) = missing_profiles([replace(NODE, types={NIGHT: LARGE})])
    assert found.code is ReasonCode.PROFILE_MISSING
    assert "phase night, but none in phase day" in found.message

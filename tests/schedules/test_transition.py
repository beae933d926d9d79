"""One round's decisions: what each observation of a worker leads to."""

from collections.abc import Mapping
from datetime import timedelta

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Ability,
    Action,
    Call,
    Power,
    Refused,
    VmKey,
    VmProof,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt.model.workers.observed import LastCall, NodePod, ScheduleObservation, WorkerNode
from gpuvirt.model.workers.spec import Begin, Drain, Leave, OnTimeout, Schedule
from gpuvirt.model.workers.status import ScheduleStatus, Worker, WorkerStep
from gpuvirt_schedules.decide.matching import candidates
from gpuvirt_schedules.decide.nextstep import HELD_AGAIN_S, CallVm, DeletePod, EvictPod, MarkNode, ScheduleAction
from gpuvirt_schedules.decide.transition import ROUND_S, VM_ROUND_S, Advance
from tests.schedules.workerround import (
    CORDONED,
    DAY,
    EVENING,
    FIFTH,
    FIRST,
    NIGHT,
    NODES,
    SCHEDULE,
    VMS,
    able,
    calls,
    decided,
    observed,
    worker,
)

POD = NodePod(PodUid("pod"), "default", "train-0")


def test_a_worker_is_cordoned_before_its_pods_are_evicted() -> None:
    found = decided(observed(NODES[FIRST], (POD,)))
    assert found.actions == (MarkNode(FIRST, "7", cordon=True),)
    assert worker(found, FIFTH).step is WorkerStep.WAIT_FOR_GPU
    evicts = decided(observed(pods=(POD,)))
    assert evicts.actions == (EvictPod(FIRST, POD),)


def test_the_round_after_a_cordon_follows_soon_unless_the_cordon_fails() -> None:
    first = decided(observed(NODES[FIRST]))
    assert first.pause_s is not None
    assert first.pause_s < ROUND_S
    again = decided(observed(NODES[FIRST]), status=first.status, at=EVENING + timedelta(seconds=1))
    assert again.actions == first.actions
    assert again.pause_s == ROUND_S


def test_rounds_follow_sooner_while_a_vm_changes_than_in_a_long_drain() -> None:
    begun = decided(observed(pods=(POD,)))
    assert begun.pause_s == VM_ROUND_S
    for seconds, pause_s in ((59, VM_ROUND_S), (60, ROUND_S)):
        at = EVENING + timedelta(seconds=seconds)
        assert decided(observed(pods=(POD,)), status=begun.status, at=at).pause_s == pause_s
    leaving = decided(observed())
    assert (calls(leaving), leaving.pause_s) == ([Action.SUSPEND], VM_ROUND_S)


def test_pods_that_kubectl_drain_leaves_do_not_delay_a_suspension() -> None:
    pods = (replace(POD, is_of_daemon_set=True), replace(POD, is_static=True), replace(POD, has_ended=True))
    assert calls(decided(observed(pods=pods))) == [Action.SUSPEND]


@pytest.mark.parametrize("pod", [replace(POD, is_bare=True), replace(POD, has_empty_dir=True)])
def test_pods_that_kubectl_drain_refuses_keep_the_node_unless_the_schedule_says_otherwise(pod: NodePod) -> None:
    found = decided(observed(pods=(pod, POD)))
    reason = worker(found).reason
    assert not found.actions
    assert reason is not None
    assert reason.code is ReasonCode.POD_BLOCKS_DRAIN
    willing = replace(SCHEDULE, drain=Drain(deletes_empty_dir_data=True, deletes_bare_pods=True))
    assert len(decided(observed(pods=(pod, POD)), willing).actions) == 2


@pytest.mark.parametrize("pod", [replace(POD, is_bare=True), replace(POD, has_empty_dir=True)])
def test_force_deletes_no_pod_whose_data_the_schedule_keeps(pod: NodePod) -> None:
    forced, late = replace(SCHEDULE, drain=Drain(on_timeout=OnTimeout.FORCE)), EVENING + timedelta(minutes=11)
    begun = decided(observed(pods=(pod, POD)), forced).status
    found = decided(observed(pods=(pod, POD)), forced, begun, late)
    reason = worker(found).reason
    assert (found.actions, reason and reason.code) == ((), ReasonCode.POD_BLOCKS_DRAIN)
    losing = Drain(on_timeout=OnTimeout.FORCE, deletes_empty_dir_data=True, deletes_bare_pods=True)
    found = decided(observed(pods=(pod, POD)), replace(SCHEDULE, drain=losing), begun, late)
    assert found.actions == (DeletePod(FIRST, pod), DeletePod(FIRST, POD))


def test_no_vm_is_suspended_while_a_pod_could_come_or_a_volume_is_attached() -> None:
    assert not calls(decided(observed(replace(CORDONED, cordoned_for_s=1.0))))
    assert not calls(decided(observed(volumes=("csi-1",))))
    assert calls(decided(observed())) == [Action.SUSPEND]


def test_a_vm_of_the_night_starts_once_those_of_the_day_are_seen_off() -> None:
    off = {**VMS, VmKey("one"): replace(VMS[VmKey("one")], power=Power.SUSPENDED)}
    assert calls(decided(observed(vms=off))) == [Action.START]
    for first in (
        replace(VMS[VmKey("one")], power=Power.SUSPENDED, is_changing=True),
        replace(VMS[VmKey("one")], power=Power.UNKNOWN, is_changing=True),
    ):
        assert not calls(decided(observed(vms={**VMS, VmKey("one"): first})))
    unseen = {VmKey("five"): VMS[VmKey("five")]}
    known = ScheduleStatus(DAY, workers=(Worker(FIRST, "uid-1", (DAY,), VmKey("one"), "worker-1", WorkerStep.SERVING),))
    found = decided(observed(vms=unseen), status=known)
    assert not calls(found)
    reason = worker(found).reason
    assert reason is not None
    assert reason.code is ReasonCode.VM_NOT_VISIBLE


def test_nothing_begins_while_the_hypervisor_is_unknown() -> None:
    found = decided(observed(NODES[FIRST], (POD,), vms=VmsUnknown("HypervisorUnknown", "refused")))
    assert not found.actions
    assert {worker(found, name).step for name in (FIRST, FIFTH)} == {WorkerStep.READ}


def test_a_drain_that_takes_too_long_is_held_or_forced() -> None:
    late = EVENING + timedelta(minutes=11)
    first = decided(observed(pods=(POD,)))
    held = decided(observed(pods=(POD,)), status=first.status, at=late)
    assert (worker(held).is_held, held.actions, held.pause_s) == (True, (EvictPod(FIRST, POD),), HELD_AGAIN_S)
    forced = replace(SCHEDULE, drain=Drain(on_timeout=OnTimeout.FORCE))
    first = decided(observed(pods=(POD,)), forced)
    found = decided(observed(pods=(POD,)), forced, first.status, late)
    assert found.actions == (DeletePod(FIRST, POD),)
    assert worker(found).forced == 1
    # The pods have ended by themselves: the transition goes on.
    assert calls(decided(observed(), status=held.status, at=late)) == [Action.SUSPEND]


def test_another_spec_ends_a_hold() -> None:
    held = decided(observed(pods=(POD,)), status=decided(observed(pods=(POD,))).status, at=EVENING + timedelta(hours=1))
    assert worker(held).is_held
    again = decided(
        observed(pods=(POD,)), replace(SCHEDULE, generation=2), held.status, EVENING + timedelta(hours=1, seconds=1)
    )
    assert again.actions == (EvictPod(FIRST, POD),)


def test_a_guest_that_does_not_shut_down_loses_its_power_only_by_force() -> None:
    down = replace(SCHEDULE, leave=Leave.SHUT_DOWN)
    late = EVENING + timedelta(seconds=301)
    assert calls(decided(observed(), down)) == [Action.SHUT_DOWN]
    assert calls(decided(observed(), down, decided(observed(), down).status, late)) == [Action.SHUT_DOWN]
    forced = replace(down, drain=Drain(on_timeout=OnTimeout.FORCE))
    assert calls(decided(observed(), forced, decided(observed(), forced).status, late)) == [Action.POWER_OFF]


def test_a_refused_call_is_made_again_some_time_later() -> None:
    refused = Refused("NoSuchCode", "the disk is full")
    seen = observed(calls={VmKey("one"): LastCall(Action.SUSPEND, refused, 3.0)})
    found = decided(seen)
    reason = worker(found).reason
    assert not calls(found)
    assert reason is not None
    assert reason.code is ReasonCode.CALL_REFUSED
    assert "the disk is full" in reason.message
    assert calls(decided(replace(seen, calls={VmKey("one"): LastCall(Action.SUSPEND, refused, 30.0)})))


def test_the_beginning_of_a_phase_is_announced_at_the_nodes_that_leave() -> None:
    serving = ScheduleStatus(
        DAY,
        workers=(
            Worker(FIRST, "uid-1", (DAY,), VmKey("one"), "worker-1", WorkerStep.SERVING),
            Worker(FIFTH, "uid-5", (NIGHT,), VmKey("five"), "worker-5", WorkerStep.AWAY),
        ),
        generation=1,
    )
    found = decided(observed(NODES[FIRST]), status=serving, at=EVENING - timedelta(minutes=10))
    assert found.actions == (MarkNode(FIRST, "7", taint=True),)
    assert found.status.announced == NIGHT
    tainted = replace(NODES[FIRST], is_announced=True)
    assert not decided(observed(tainted), status=serving, at=EVENING - timedelta(minutes=10)).actions
    early = decided(observed(tainted), status=serving, at=EVENING - timedelta(hours=1))
    assert early.actions == (MarkNode(FIRST, "7", taint=False),)


def test_an_old_condition_and_an_old_heartbeat_do_not_make_a_worker_ready() -> None:
    both = {key: replace(vm, power=Power.SUSPENDED if key == "one" else Power.ON) for key, vm in VMS.items()}
    fifth = replace(NODES[FIFTH], is_ready=True, is_unschedulable=True, cordoned_by="gpus", renewal="20:00:00")
    seen = replace(observed(vms=both), nodes={FIRST: CORDONED, FIFTH: fifth})
    first = decided(seen)
    assert worker(first, FIFTH).step is WorkerStep.HEARTBEAT
    assert not first.actions
    again = decided(seen, status=first.status)
    assert not again.actions
    alive = replace(seen, nodes={FIRST: CORDONED, FIFTH: replace(fifth, renewal="20:01:00")})
    assert decided(alive, status=again.status).actions == (MarkNode(FIFTH, "9", cordon=False, taint=False),)


@pytest.mark.parametrize(("age_s", "is_skewed"), [(5, False), (40, False), (3600, True), (-60, True)])
def test_a_guest_whose_clock_stands_at_its_suspension_is_reported(age_s: int, *, is_skewed: bool) -> None:
    both = {key: replace(vm, power=Power.SUSPENDED if key == "one" else Power.ON) for key, vm in VMS.items()}
    fifth = replace(NODES[FIFTH], is_ready=True, renewal="new", renewed_at=EVENING - timedelta(seconds=age_s))
    started = Worker(FIFTH, "uid-5", (NIGHT,), VmKey("five"), "worker-5", WorkerStep.HEARTBEAT, EVENING, "old")
    seen = replace(observed(vms=both), nodes={FIRST: CORDONED, FIFTH: fifth})
    found = worker(decided(seen, status=ScheduleStatus(DAY, workers=(started,))), FIFTH)
    assert found.step is WorkerStep.SERVING
    assert (found.reason is not None and found.reason.code is ReasonCode.CLOCK_SKEWED) is is_skewed


def test_a_cordon_of_an_admin_stays() -> None:
    both = {key: replace(vm, power=Power.SUSPENDED if key == "one" else Power.ON) for key, vm in VMS.items()}
    fifth = replace(NODES[FIFTH], is_ready=True, is_unschedulable=True)
    found = decided(replace(observed(vms=both), nodes={FIRST: CORDONED, FIFTH: fifth}))
    assert not found.actions
    assert worker(found, FIFTH).step is WorkerStep.SERVING
    assert found.status.phase == NIGHT


def test_two_nodes_never_have_one_vm() -> None:
    twin = replace(NODES[FIFTH], name=NodeName("twin"), uid="uid-t", phases=frozenset({DAY}), is_ready=True)
    seen = replace(observed(), nodes={FIFTH: NODES[FIFTH], NodeName("twin"): twin})
    found = decided(seen)
    assert not calls(found)
    assert {worker(found, name).step for name in (FIFTH, NodeName("twin"))} == {WorkerStep.MATCH}


def test_a_node_that_lost_its_labels_is_reported_and_stays_a_worker() -> None:
    known = ScheduleStatus(
        DAY, workers=(Worker(FIRST, "", (DAY,), VmKey("one"), "worker-1", WorkerStep.SERVING),), generation=1
    )
    back = replace(NODES[FIRST], uid="uid-2", phases=frozenset())
    found = decided(observed(back), status=known, at=EVENING - timedelta(hours=8))
    reason = worker(found).reason
    assert reason is not None
    assert reason.code is ReasonCode.WORKER_LABELS_LOST


@pytest.mark.parametrize("upper", [True, False])
def test_either_byte_order_of_a_system_uuid_matches(*, upper: bool) -> None:
    uuid = "421c5a83-1234-5678-9abc-0123456789ab"
    node = replace(NODES[FIRST], system_uuid="835A1C42-3412-7856-9ABC-0123456789AB" if upper else uuid)
    vm = replace(VMS[VmKey("one")], system_uuid=uuid, name="another name")
    assert candidates(node, {vm.key: vm}) == (vm,)


@pytest.mark.parametrize(
    ("node", "vm"),
    [
        (replace(CORDONED, system_uuid=""), VMS[VmKey("one")]),
        (CORDONED, replace(VMS[VmKey("one")], system_uuid="")),
        (CORDONED, replace(VMS[VmKey("one")], system_uuid="421c5a83-ffff-4000-8000-000000000001")),
    ],
)
def test_no_call_is_made_for_a_vm_that_has_only_the_name_of_the_node(node: WorkerNode, vm: WorkerVm) -> None:
    for known in ((), (Worker(FIRST, "uid-1", (DAY,), vm.key, vm.name, WorkerStep.SERVING),)):
        found = decided(observed(node, vms={**VMS, vm.key: vm}), status=ScheduleStatus(DAY, workers=known))
        reason = worker(found).reason
        assert not calls(found)
        assert reason is not None
        assert (reason.code, FIRST in reason.text, vm.name in reason.message) == (ReasonCode.VM_NOT_MATCHED, True, True)
        uncordoned = replace(node, is_unschedulable=False, cordoned_by="")
        assert not decided(observed(uncordoned, (POD,), vms={**VMS, vm.key: vm}), status=found.status).actions


FORCED = replace(SCHEDULE, drain=Drain(on_timeout=OnTimeout.FORCE))
DOWN = replace(FORCED, leave=Leave.SHUT_DOWN)
SINCE_S = 3600
"""The begin of the next leader's rounds, long after each deadline."""
FIRST_OFF = {**VMS, VmKey("one"): replace(VMS[VmKey("one")], power=Power.SUSPENDED)}


def uncordoning(renewal: str) -> ScheduleObservation:
    """Return what is observed of a worker of the night that is on, cordoned, and whose Lease was renewed."""
    fifth = replace(NODES[FIFTH], is_ready=True, renewal=renewal, is_unschedulable=True, cordoned_by="gpus")
    away = replace(CORDONED, is_ready=False)
    on = {**FIRST_OFF, VmKey("five"): replace(VMS[VmKey("five")], power=Power.ON)}
    return replace(observed(away, vms=on), nodes={FIRST: away, FIFTH: fifth})


@pytest.mark.parametrize(
    ("schedule", "seen", "timeout_s", "late"),
    [
        (SCHEDULE, observed(NODES[FIRST]), 120, None),
        (SCHEDULE, observed(pods=(POD,)), 600, None),
        (FORCED, observed(pods=(POD,)), 600, (DeletePod(FIRST, POD),)),
        (FORCED, observed(), 600, None),
        (DOWN, observed(), 300, (CallVm(FIRST, Call(VmProof(VmKey("one")), Action.POWER_OFF)),)),
        (SCHEDULE, observed(vms=FIRST_OFF), 600, None),
        (SCHEDULE, uncordoning("new"), 120, None),
    ],
)
def test_the_time_of_a_step_counts_from_its_begin_or_this_leader_s_first_round(
    schedule: Schedule, seen: ScheduleObservation, timeout_s: int, late: tuple[ScheduleAction, ...] | None
) -> None:
    """`late` has other actions than before; None where the step is held, and its actions are tried again."""
    before = uncordoning("old") if uncordoning("new") == seen else seen
    first = decided(seen, schedule, decided(before, schedule).status)
    assert first.actions

    def actions(rounds_since_s: int | None, at_s: int) -> tuple[ScheduleAction, ...] | None:
        since = EVENING + timedelta(seconds=rounds_since_s) if rounds_since_s is not None else None
        again = replace(seen, rounds_since=since)
        found = decided(again, schedule, first.status, EVENING + timedelta(seconds=at_s))
        return None if found.status.held else found.actions

    for since_s in (None, -7, 0):  # the leader is the one in whose term the step began
        assert actions(since_s, timeout_s - 1) == first.actions
        assert actions(since_s, timeout_s) == late
    assert actions(None, SINCE_S) != first.actions
    for at_s in (SINCE_S, SINCE_S + timeout_s - 1):
        assert actions(SINCE_S, at_s) == first.actions
    assert actions(SINCE_S, SINCE_S + timeout_s) == late


def test_what_was_held_stays_held_and_a_begin_stays_as_written_when_another_controller_leads() -> None:
    late = EVENING + timedelta(hours=1)
    held = decided(observed(pods=(POD,)), status=decided(observed(pods=(POD,))).status, at=late)
    next_leader = replace(observed(pods=(POD,)), rounds_since=late)
    found = decided(next_leader, status=held.status, at=late)
    assert (worker(found).is_held, worker(found).since, found.actions) == (True, EVENING, (EvictPod(FIRST, POD),))


SECOND = NodeName("worker-2")
OTHER_VM = replace(VMS[VmKey("one")], key=VmKey("two"), name=SECOND, system_uuid="421c5a83-0000-4000-8000-000000000002")
OTHER = replace(NODES[FIRST], name=SECOND, uid="uid-2", system_uuid=OTHER_VM.system_uuid)
NOT_SUPPORTED = Ability(False, "SuspendNotSupported", "its host says suspendSupported: false")


POSSIBLE = Ability(True)


def two_leave(
    one: Ability = POSSIBLE,
    first: WorkerNode = NODES[FIRST],
    second: WorkerNode = OTHER,
    status: ScheduleStatus | None = None,
    schedule: Schedule = SCHEDULE,
    abilities: Mapping[VmKey, Abilities] | VmsUnknown | None = None,
) -> Advance:
    """Return the round of an evening in which two workers have to leave; `one` is whether the first is suspended."""
    known = {**able(one=one), OTHER_VM.key: able()[VmKey("one")]}
    seen = replace(
        observed(first, (POD,)),
        nodes={**NODES, FIRST: first, SECOND: second},
        vms={**VMS, OTHER_VM.key: OTHER_VM},
        abilities=known if abilities is None else abilities,
    )
    return decided(seen, schedule, status)


def test_no_worker_is_drained_before_all_vms_that_leave_are_known_to_be_able_to() -> None:
    assert [action.node for action in two_leave().actions] == [FIRST, SECOND]
    asked = two_leave(abilities={})
    assert (asked.actions, asked.unchecked) == ((), frozenset({VmKey("one"), VmKey("two")}))
    unknown = two_leave(abilities=VmsUnknown("HypervisorUnreachable", "no answer"))
    assert (unknown.actions, worker(unknown).step) == ((), WorkerStep.READ)
    refused = two_leave(NOT_SUPPORTED)
    codes = {found.node: found.reason and found.reason.code for found in refused.status.workers}
    assert (refused.actions, codes[FIRST], codes[SECOND]) == (
        (), ReasonCode.SUSPEND_NOT_SUPPORTED, ReasonCode.OTHERS_STAY,
    )  # fmt: skip
    anyway = two_leave(NOT_SUPPORTED, schedule=replace(SCHEDULE, begin=Begin.ANYWAY), abilities={})
    assert ([action.node for action in anyway.actions], anyway.unchecked) == ([FIRST, SECOND], frozenset())


def test_a_switch_that_can_not_begin_is_held_and_goes_on_once_all_can_leave() -> None:
    begun = two_leave(NOT_SUPPORTED).status
    late = EVENING - timedelta(minutes=1)
    held = two_leave(
        NOT_SUPPORTED,
        status=replace(begun, workers=tuple(replace(found, since=late) for found in begun.workers)),
    )
    assert ({found.node for found in held.status.held}, held.actions) == ({FIRST, SECOND}, ())
    assert [action.node for action in two_leave(status=held.status).actions] == [FIRST, SECOND]


def test_a_worker_without_a_known_vm_keeps_the_others() -> None:
    found = two_leave(first=replace(NODES[FIRST], system_uuid=""))
    assert (found.actions, worker(found).step, worker(found, SECOND).step) == ((), WorkerStep.MATCH, WorkerStep.CHECK)
    known = ScheduleStatus(DAY, workers=(Worker(FIRST, "uid-1", (DAY,), VmKey("one"), "worker-1"),))
    seen = replace(observed(), nodes={SECOND: OTHER}, vms={**VMS, OTHER_VM.key: OTHER_VM}, abilities=able())
    deleted = decided(seen, status=known)
    assert (deleted.actions, worker(deleted, SECOND).step) == ((), WorkerStep.CHECK)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_worker_that_has_begun_to_leave_goes_on_whatever_the_others_can(*, is_ours: bool) -> None:
    begun = replace(OTHER, is_unschedulable=True, cordoned_by="gpus" if is_ours else "", cordoned_for_s=60.0)
    known = Worker(SECOND, "uid-2", (DAY,), VmKey("two"), step=WorkerStep.DRAIN)
    status = ScheduleStatus(DAY, workers=() if is_ours else (known,))
    found = two_leave(NOT_SUPPORTED, second=begun, status=status)
    assert (calls(found), worker(found).step) == ([Action.SUSPEND], WorkerStep.CHECK)


def test_force_takes_the_power_of_a_guest_that_can_not_be_shut_down() -> None:
    down = replace(SCHEDULE, leave=Leave.SHUT_DOWN)
    refusing, unproven = (
        {
            key: replace(found, shut_down=Ability(is_possible, "HypervisorRefused", "no"))
            for key, found in able().items()
        }
        for is_possible in (False, None)
    )
    seen = replace(observed(NODES[FIRST]), abilities=refusing)
    assert decided(seen, down).actions == ()
    assert decided(seen, replace(down, drain=Drain(on_timeout=OnTimeout.FORCE))).actions
    assert decided(replace(seen, abilities=unproven), down).actions


def test_a_vm_that_another_schedule_has_matched_is_left_alone_by_both() -> None:
    seen = replace(observed(), claims={VmKey("one"): "node worker-9 of schedule other"})
    for node in (NODES[FIRST], CORDONED):
        found = decided(replace(seen, nodes={**NODES, FIRST: node}))
        reason = worker(found).reason
        assert (found.actions, worker(found).step, worker(found).vm) == ((), WorkerStep.MATCH, VmKey("one"))
        assert reason is not None
        assert "worker-9 of schedule other" in reason.text
    gone = decided(replace(seen, nodes={FIFTH: NODES[FIFTH]}), status=decided(seen).status)
    assert [known.node for known in gone.status.workers] == [FIFTH], "its stale Node was deleted"
    vm = replace(VMS[VmKey("five")], power=Power.SUSPENDED)
    off = {VmKey("one"): replace(VMS[VmKey("one")], power=Power.SUSPENDED), VmKey("five"): vm}
    starts = replace(observed(vms=off), claims={VmKey("five"): "node worker-9 of schedule other"})
    assert calls(decided(starts)) == []


def test_a_request_that_was_forbidden_is_the_reason_only_of_a_step_that_makes_it() -> None:
    seen = replace(observed(pods=(POD,)), forbidden={FIRST: "create pods/eviction: 403"})
    volumes = replace(seen, pods={}, attachments={FIRST: ("csi-1",)})
    found = [worker(decided(each)).reason for each in (seen, volumes, replace(seen, forbidden={}))]
    assert [reason and reason.code for reason in found] == [
        ReasonCode.RIGHT_MISSING,
        ReasonCode.VOLUMES_ATTACHED,
        ReasonCode.PODS_LEFT,
    ]

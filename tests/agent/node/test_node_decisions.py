"""The decisions for a node: a table of pictures with what they decide, and laws over sequences of pictures."""

import dataclasses
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.ledger import Consumer, Entry, KubeletAccount, Ledger, OfSeveral
from gpuvirt.model.allocation.nodeledger import node_ledger
from gpuvirt.model.allocation.tenancy import TenantKind, tenant
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus.scheduling import SchedulerReport
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.node.decisions import NodeDecisions, decide
from gpuvirt.model.node.offering import departures
from gpuvirt.model.node.parts import Parts
from gpuvirt.model.node.picture import GateStates, NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import A10, HOST, LEFT, RIGHT, RTX, T4
from tests.agent.node.pictures import (
    A10_NAME,
    HOSTS,
    NOTICE,
    T4_NAME,
    TERMS,
    VGPUS,
    _a10_off_the_bus,
    _a10_unread,
    a10_unplugged,
    a_vgpu_removed,
    as_built,
    decided_at,
    desiring,
    facts_of,
    observed,
    with_answer,
    with_host,
)
from tests.thoroughness import examples

UNMANAGED = DesiredMode.UNMANAGED
REVIEW = replace(TERMS, review=ReviewTerms(30.0, expected=True))


Listed = Mapping[ResourceName, Mapping[DeviceId, bool]]
"""The devices that the kubelet gets by resource, and whether each is healthy."""


def listed(decided: NodeDecisions) -> Listed:
    return {
        name: {device.id: device.health.healthy for device in offer.devices.values()}
        for name, offer in decided.memory.offers.by_resource.items()
    }


def ids(decided: NodeDecisions) -> set[str]:
    return {device for devices in listed(decided).values() for device in devices}


def codes(decided: NodeDecisions) -> Mapping[str, ReasonCode]:
    return {subject: reason.code for subject, reason in decided.memory.offers.withheld.items()}


def allocated(picture: NodePicture, decided: NodeDecisions, resource: ResourceName, device: DeviceId) -> NodePicture:
    """Return the picture after Allocate has given a listed device to a pod."""
    candidate = decided.memory.offers.by_resource[resource].devices[device].candidate
    entry = Entry(resource, device, candidate.target, candidate.group, f"allocate:{device}", BEGINNING, allocated_s=0.0)
    ledger = picture.ledger if decided.names is None else picture.ledger.with_names(decided.names)
    return replace(picture, ledger=replace(ledger, entries=(*ledger.entries, entry)))


A_POD = PodUid("pod")
NOBODY: OfSeveral = {}


def held(
    decided: NodeDecisions, resource: ResourceName, device: DeviceId, *, of_several: OfSeveral | None = NOBODY
) -> NodePicture:
    """Return the picture in which the kubelet has named the pod that has a device, and the devices of several."""
    picture, key = allocated(observed(), decided, resource, device), (resource, device)
    consumers = {key: Consumer(namespace="default", pod="a", container="compute")}
    known = KubeletAccount(BEGINNING, 20.0, consumers, frozenset(consumers), of_several=of_several)
    return replace(picture, ledger=picture.ledger.with_account(known))


# --- a picture, and what it decides


def test_before_the_first_observation_nothing_is_offered_and_problems_are_shown() -> None:
    problem = nodeproblems.awaits_controller("a", 1.0)
    decided = decided_at(replace(NodePicture(), problems={"watcher": problem}))
    assert (listed(decided), decided.names, decided.memory) == ({}, None, NodeMemory())
    assert (decided.view.host_observed, decided.view.problems) == (False, (problem,))


def test_all_devices_on_vfio_and_all_vgpus_are_offered() -> None:
    decided = decided_at(observed())
    assert {LEFT, RIGHT, A10} <= ids(decided)
    assert len(listed(decided)[VGPUS]) == 2
    assert all(healthy for devices in listed(decided).values() for healthy in devices.values())
    assert decided.names is not None
    assert decided.names.resources == decided.memory.offers.by_resource.keys()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda picture: replace(picture, gates=GateStates(drained=Scope(frozenset({A10})))), ReasonCode.UNIT_BUSY),
        (lambda picture: replace(picture, gates=GateStates(changed=Scope(frozenset({A10})))), ReasonCode.UNIT_BUSY),
        (lambda picture: replace(picture, gates=GateStates(blocked={A10: "unbind"})), ReasonCode.WRITE_BLOCKED),
        (lambda picture: desiring(picture, DesiredMode.CONTAINER), ReasonCode.WITHDRAWN),
        (
            lambda picture: desiring(picture, UNMANAGED, withheld=(Withheld(A10_NAME, "ForeignProvider", "x"),)),
            ReasonCode.FOREIGN_PROVIDER,
        ),
    ],
    ids=["drained elsewhere", "changed here", "blocked by the kernel", "another mode is desired", "KubeVirt offers it"],
)
def test_a_gpu_is_withheld_unless_a_pod_has_it(change: Callable[[NodePicture], NodePicture], code: ReasonCode) -> None:
    before = decided_at(observed())
    withheld = decided_at(change(observed()), 1.0, before.memory)
    assert A10 not in ids(withheld)
    assert codes(withheld)[A10] is code
    held = allocated(observed(), before, A10_NAME, DeviceId(A10))
    kept = listed(decided_at(change(held), 1.0, before.memory))
    assert kept[A10_NAME] == {DeviceId(A10): True}, "its container could not start again"


def test_a_pod_keeps_its_gpu_of_a_shared_group_while_allocations_are_unknown() -> None:
    before = decided_at(observed())
    held = allocated(observed(), before, T4_NAME, DeviceId(LEFT))
    unknown = replace(held, ledger=replace(held.ledger, account=None))
    assert listed(decided_at(unknown, 1.0, before.memory))[T4_NAME] == {DeviceId(LEFT): True}


def test_a_device_that_cannot_be_read_stays_listed_and_one_that_is_gone_does_not() -> None:
    before = decided_at(observed())
    assert A10 in ids(decided_at(observed(_a10_unread), 5.0, before.memory))
    assert A10 not in ids(decided_at(observed(a10_unplugged), 5.0, before.memory))


def test_a_new_name_waits_for_its_review_until_it_has_waited_long_enough() -> None:
    waits = decided_at(observed(), 0.0, terms=REVIEW)
    assert ids(waits) == set()
    assert waits.again_at_s == 30.0
    assert waits.names is not None
    assert waits.names.resources == frozenset()
    picture = desiring(observed(), UNMANAGED, reviewed=(A10_NAME,))
    assert ids(decided_at(picture, 1.0, waits.memory, REVIEW)) == {A10}
    silent = decided_at(observed(), 30.0, waits.memory, REVIEW)
    assert A10 in ids(silent)
    assert {note.code for note in silent.view.problems} == {ReasonCode.CONTROLLER_SILENT}
    without_kind = replace(observed(), is_kind_known=False)
    assert A10 in ids(decided_at(without_kind, 0.0, terms=REVIEW)), "nothing can review names without the kind"


def test_a_withdrawal_waits_until_the_scheduler_has_the_new_count() -> None:
    registered = {name: Registration(registered=True) for name in listed(decided_at(observed()))}
    picture = replace(observed(), registrations=registered)
    offered = decided_at(picture, 0.0, terms=NOTICE)
    leaving = desiring(picture, DesiredMode.CONTAINER)
    announced = decided_at(leaving, 1.0, offered.memory, NOTICE)
    assert A10 in ids(announced)
    assert announced.memory.notice.counts[A10_NAME].most == 0
    assert announced.again_at_s == 4.0, "the status can't be written: the wait is bounded"
    known = decided_at(replace(leaving, status_counts={A10_NAME: 0, T4_NAME: 0}), 1.5, announced.memory, NOTICE)
    assert A10 in ids(known)
    assert known.again_at_s == 2.0
    assert A10 not in ids(decided_at(replace(leaving, status_counts={}), 2.0, known.memory, NOTICE))


def fails(picture: NodePicture) -> NodePicture:
    return with_host(picture, facts_of(_a10_off_the_bus))


def test_an_announced_withdrawal_waits_its_time_whatever_becomes_of_the_device() -> None:
    registered = {name: Registration(registered=True) for name in listed(decided_at(observed()))}
    offered = decided_at(replace(observed(), registrations=registered), 0.0, terms=NOTICE)
    leaving = desiring(replace(observed(), registrations=registered), DesiredMode.CONTAINER)
    announced = decided_at(fails(leaving), 1.0, offered.memory, NOTICE)
    unhealthy = decided_at(fails(leaving), 2.5, announced.memory, NOTICE)
    assert listed(unhealthy)[A10_NAME] == {DeviceId(A10): False}
    again = decided_at(fails(leaving), 2.5, unhealthy.memory, NOTICE)
    assert (outcome(again), again.again_at_s) == (outcome(unhealthy), 4.0)
    assert A10 not in ids(decided_at(fails(leaving), 4.0, again.memory, NOTICE))


def test_a_withdrawal_is_not_taken_back_by_another_count_in_the_status() -> None:
    picture = replace(observed(), registrations={A10_NAME: Registration(registered=True)})
    offered = decided_at(picture, 0.0, terms=NOTICE)
    leaving = replace(desiring(picture, DesiredMode.CONTAINER), status_counts={})
    announced = decided_at(leaving, 1.0, offered.memory, NOTICE)
    withdrawn = decided_at(leaving, 1.5, announced.memory, NOTICE)
    assert A10 not in ids(withdrawn)
    assert A10 not in ids(decided_at(replace(leaving, status_counts={A10_NAME: 1}), 1.6, withdrawn.memory, NOTICE))


def test_the_scheduler_does_not_know_a_withdrawal_by_the_count_of_a_vgpu_that_is_gone() -> None:
    """The first decision has the last offers, in which a vGPU that was removed by hand still is."""
    registered = replace(observed(), registrations={VGPUS: Registration(registered=True)})
    offered = decided_at(registered, 0.0, terms=NOTICE)
    leaving = replace(desiring(registered, DesiredMode.PASSTHROUGH), status_counts={VGPUS: 1})
    left = with_host(leaving, facts_of(a_vgpu_removed))
    first = decided_at(left, 0.0, offered.memory, NOTICE)
    again = decided_at(left, 0.0, first.memory, NOTICE)
    assert (first.again_at_s, again.again_at_s) == (3.0, 3.0)


def test_undesired_vgpus_are_withdrawn_and_allocated_ones_stay() -> None:
    before = decided_at(observed())
    first, second = sorted(listed(before)[VGPUS])
    picture = desiring(held(before, VGPUS, first), DesiredMode.VGPU, "T4-4Q")
    decided = decided_at(picture, 1.0, before.memory)
    assert listed(decided)[VGPUS] == {first: False}, "the kubelet gives it to no other pod once its pod has ended"
    assert codes(decided)[second] is ReasonCode.WITHDRAWN
    unknown = replace(picture, request=replace(picture.request or NodeRequest(), configs=None))
    unplanned = decided_at(unknown, 1.0, before.memory)
    assert set(listed(unplanned)[VGPUS]) == {first, second}
    assert not unplanned.desired.vgpus.plan_of(T4).steps


@pytest.mark.parametrize(
    ("of_several", "is_healthy"),
    [
        (NOBODY, False),
        ({(A10_NAME, DeviceId(A10)): A_POD}, True),
        (None, True),
        ({(T4_NAME, DeviceId(T4)): A_POD}, False),
    ],
    ids=["one container", "several containers", "no checkpoint", "another pod has several"],
)
def test_a_device_that_leaves_is_healthy_for_a_pod_that_the_kubelet_could_reject(
    of_several: OfSeveral | None, is_healthy: bool
) -> None:
    """A kubelet that starts passes over containers that run, and rejects a pod for the device of one that has ended."""
    before = decided_at(observed())
    picture = desiring(held(before, A10_NAME, DeviceId(A10), of_several=of_several), DesiredMode.CONTAINER)
    decided = decided_at(picture, 21.0, before.memory)
    assert listed(decided)[A10_NAME] == {DeviceId(A10): is_healthy}
    (reason,) = decided.memory.offers.by_resource[A10_NAME].devices[DeviceId(A10)].health.against
    assert reason.code is (ReasonCode.LEAVES_AFTER_POD if is_healthy else ReasonCode.WITHDRAWN)
    counted = departures(picture, decided.memory.withdrawal)
    assert (A10 in counted.functions) is not is_healthy, "no other pod gets it, whatever the kubelet counts"


@pytest.mark.parametrize(
    ("of_several", "ends", "most"),
    [
        ({(A10_NAME, DeviceId(A10)): A_POD}, PodEnds(), 1),
        (None, PodEnds(), 1),
        ({(A10_NAME, DeviceId(A10)): A_POD}, PodEnds(deleted=frozenset({A_POD})), 0),
        ({(A10_NAME, DeviceId(A10)): A_POD}, PodEnds(ended=frozenset({A_POD})), 0),
        (NOBODY, PodEnds(), 0),
    ],
    ids=["it runs", "no checkpoint", "it is being deleted", "it has ended", "one container"],
)
def test_the_scheduler_counts_a_device_that_stays_for_its_pod_until_the_pod_ends(
    of_several: OfSeveral | None, ends: PodEnds, most: int
) -> None:
    """The kubelet counts it, too: a lower count in the node's status would be raised and lowered again and again."""
    registered = {name: Registration(registered=True) for name in listed(decided_at(observed()))}
    before = decided_at(replace(observed(), registrations=registered), 0.0, terms=NOTICE)
    picture = desiring(held(before, A10_NAME, DeviceId(A10), of_several=of_several), DesiredMode.CONTAINER)
    picture = replace(picture, registrations=registered, pod_ends=ends)
    announced = decided_at(picture, 21.0, before.memory, NOTICE)
    withdrawn = decided_at(picture, 26.0, announced.memory, NOTICE)
    assert withdrawn.memory.notice.counts[A10_NAME].most == most


def test_a_device_of_a_pod_that_is_being_admitted_stays_healthy() -> None:
    """Until the kubelet has named the pod, nothing is known of its containers."""
    before = decided_at(observed())
    picture = desiring(allocated(observed(), before, A10_NAME, DeviceId(A10)), DesiredMode.CONTAINER)
    assert listed(decided_at(picture, 1.0, before.memory))[A10_NAME] == {DeviceId(A10): True}


def test_beside_another_plugin_nothing_is_offered_and_vgpus_are_planned() -> None:
    picture = desiring(observed(), DesiredMode.VGPU, "T4-4Q")
    decided = decided_at(picture, terms=replace(TERMS, vgpus_only=True))
    assert listed(decided) == {}
    assert decided.memory.withdrawal.vgpus
    assert all(target.driver is None for target in decided.desired.vgpus.desired.values())


def test_problems_are_shown_once_with_the_invalid_desired_state_first() -> None:
    problem = Reason(ReasonCode.SCAN_BLOCKED, "the host", "is not read")
    picture = desiring(observed(), UNMANAGED, gpus={"0000:ff:00.0": "vgpu"})
    picture = replace(picture, problems={"a": problem, "b": problem})
    notes = decided_at(picture).view.problems
    assert [note.code for note in notes] == [decided_at(picture).invalid.reasons[0].code, ReasonCode.SCAN_BLOCKED]


# --- what is not decided again


def test_a_picture_that_has_not_changed_is_not_decided_again() -> None:
    picture = desiring(observed(), DesiredMode.VGPU, "T4-8Q")
    first = decided_at(picture)
    second = decided_at(picture, 1.0, first.memory)
    third = decided_at(picture, 2.0, second.memory)
    assert third.desired.vgpus is second.desired.vgpus is first.desired.vgpus
    assert third.memory.offers is second.memory.offers
    assert third.view.gpus is second.view.gpus


def test_a_pod_that_gets_a_device_leads_to_plans_of_its_gpu_alone() -> None:
    picture = desiring(observed(), DesiredMode.VGPU, "T4-8Q", gpus={A10: "passthrough"})
    before = decided_at(picture)
    given = allocated(picture, before, VGPUS, min(listed(before)[VGPUS]))
    after = decided_at(given, 1.0, before.memory)
    states, last = after.desired.vgpus.planned_from, before.desired.vgpus.planned_from
    assert states is not None
    assert last is not None
    again = {gpu for gpu, state in states.states.items() if state is not None and state is last.states[gpu]}
    assert again == {gpu for gpu, state in states.states.items() if state is not None} - {T4}
    assert after == decided_at(given, 1.0, dataclasses.replace(before.memory, parts=Parts()))


def test_an_observation_keeps_what_has_not_changed() -> None:
    kernel = build_host(HOST)
    before = scan(kernel)
    _a10_off_the_bus(kernel)
    after = scan(kernel).after(before)
    assert after == scan(kernel)
    assert {address for address in after.functions if after.functions[address] is not before.functions[address]} == {
        A10
    }
    assert all(after.vgpu_hosts[gpu] is host for gpu, host in before.vgpu_hosts.items())


# --- laws of every sequence of pictures


@dataclass(frozen=True)
class Outcome:
    """The effects of decisions that others see: the lists, the withdrawn devices, the names that wait."""

    listed: Listed
    withdrawn: frozenset[str]
    waiting: frozenset[ResourceName]
    desired: object


def outcome(decided: NodeDecisions) -> Outcome:
    memory = decided.memory
    return Outcome(listed(decided), memory.withdrawal.all, frozenset(memory.review.waiting), decided.desired.vgpus)


MODES = st.sampled_from(list(DesiredMode))
GPUS = st.sampled_from([LEFT, RIGHT, RTX, A10])


class Pictures(RuleBasedStateMachine):
    """A node whose picture changes piece by piece, and is decided after each piece."""

    @initialize(terms=st.sampled_from([NOTICE, TERMS, REVIEW]), has_begun=st.booleans())
    def begin(self, terms: NodeTerms, has_begun: bool) -> None:
        self.terms = terms
        self.now_s = 0.0
        self.picture = NodePicture(ledger=node_ledger(Ledger()))
        self.decided = NodeDecisions()
        self.decide()
        if has_begun:
            self.the_host_is_observed(as_built)
            self.the_kubelet_answers()
            self.the_status_is_seen(None)

    def decide(self) -> None:
        before = self.decided
        self.decided = decide(self.picture, before.memory, self.terms, self.now_s, BEGINNING)
        assert decide(self.picture, before.memory, self.terms, self.now_s, BEGINNING) == self.decided
        without_parts = dataclasses.replace(before.memory, parts=Parts())
        assert decide(self.picture, without_parts, self.terms, self.now_s, BEGINNING) == self.decided
        if (names := self.decided.names) is not None:
            assert names.resources >= self.picture.ledger.resources
            self.picture = replace(self.picture, ledger=self.picture.ledger.with_names(names))

    @rule(happens=st.sampled_from(HOSTS))
    def the_host_is_observed(self, happens: Callable[[SimKernel], None]) -> None:
        self.picture = with_host(self.picture, facts_of(happens))
        self.decide()

    @rule()
    def the_kubelet_answers(self) -> None:
        self.picture = with_answer(self.picture, self.now_s)
        self.decide()

    @rule()
    def the_kubelet_does_not_answer(self) -> None:
        before = outcome(self.decided)
        self.decide()
        settled = outcome(self.decided)
        self.picture = replace(self.picture, ledger=self.picture.ledger.with_account(None))
        self.decide()
        assert outcome(self.decided) == settled, before

    @rule(mode=MODES, gpu=GPUS, of_gpu=MODES, config=st.sampled_from(["T4-4Q", "T4-8Q", "T4-16Q", "none-such", None]))
    def a_gpu_node_is_observed(
        self, mode: DesiredMode, gpu: PciAddress, of_gpu: DesiredMode, config: str | None
    ) -> None:
        self.picture = desiring(self.picture, mode, config, gpus={gpu: str(of_gpu)})
        self.decide()

    @rule(mode=st.sampled_from(["no-mode", ""]))
    def an_invalid_gpu_node_changes_nothing(self, mode: str) -> None:
        before = self.decided.memory.desired
        self.picture = replace(self.picture, request=NodeRequest(spec=Observed(GpuNodeSpec(mode))))
        self.decide()
        now = self.decided.memory.desired
        assert (now.modes, now.config.name) == (before.modes, before.config.name)
        assert now.invalid_modes is not None

    @rule()
    def the_cluster_is_unknown(self) -> None:
        """An agent that has lost its desired state keeps what it has decided by."""
        before = self.decided.memory.desired
        self.picture = replace(self.picture, request=NodeRequest())
        self.decide()
        now = self.decided.memory.desired
        assert (now.modes, now.config.name) == (before.modes, before.config.name)

    @rule(drained=st.frozensets(GPUS), changed=st.frozensets(GPUS))
    def gates_close(self, drained: frozenset[PciAddress], changed: frozenset[PciAddress]) -> None:
        self.picture = replace(self.picture, gates=GateStates(Scope(drained), {}, Scope(changed)))
        self.decide()

    @rule(counts=st.one_of(st.none(), st.dictionaries(st.sampled_from([A10_NAME, T4_NAME, VGPUS]), st.integers(0, 2))))
    def the_status_is_seen(self, counts: Mapping[ResourceName, int] | None) -> None:
        registered = {name: Registration(registered=True) for name in listed(self.decided)}
        self.picture = replace(self.picture, status_counts=counts, registrations=registered)
        withdrawn = self.decided.memory.withdrawal.all
        self.decide()
        assert withdrawn <= self.decided.memory.withdrawal.all

    @rule(data=st.data())
    def a_pod_gets_a_device(self, data: st.DataObject) -> None:
        held = {(entry.resource, entry.device) for entry in self.picture.ledger.entries}
        free = [
            (name, device)
            for name, devices in listed(self.decided).items()
            for device, healthy in devices.items()
            if healthy and (name, device) not in held
        ]
        if free:
            self.picture = allocated(self.picture, self.decided, *data.draw(st.sampled_from(free)))
            self.decide()

    @rule(who=st.sampled_from(["watcher", "gates"]), is_problem=st.booleans())
    def a_part_of_the_agent_has_a_problem(self, who: str, is_problem: bool) -> None:
        problems = {who: Reason(ReasonCode.SCAN_BLOCKED, who, "is blocked")} if is_problem else {}
        self.picture = replace(self.picture, problems=problems)
        self.decide()

    @rule(gpu=GPUS, kind=st.sampled_from(list(TenantKind)))
    def a_gpu_has_had_a_tenant(self, gpu: PciAddress, kind: TenantKind) -> None:
        tenancies = self.picture.former.tenancies.with_tenants({gpu: tenant(kind)})
        self.picture = replace(self.picture, former=replace(self.picture.former, tenancies=tenancies))
        self.decide()

    @rule(gpu=st.sampled_from([RTX, A10, T4]), policy=st.sampled_from(list(SchedulerPolicy)))
    def a_scheduler_is_reported(self, gpu: PciAddress, policy: SchedulerPolicy) -> None:
        if (context := self.decided.desired.vgpus.time_shared.get(gpu)) is not None:
            memory = self.decided.memory
            smi = memory.smi.with_scheduler(gpu, SchedulerReport(Scheduler(policy), context, self.now_s))
            self.decided = replace(self.decided, memory=dataclasses.replace(memory, smi=smi))
            self.decide()

    @rule()
    def the_agent_starts_again(self) -> None:
        self.decided = NodeDecisions()
        self.decide()

    @rule(seconds=st.floats(0.1, 40.0))
    def time_passes(self, seconds: float) -> None:
        due_s = (self.decided.again_at_s, self.decided.judged_again_at_s)
        first_s = min((at_s for at_s in due_s if at_s is not None), default=None)
        self.decide()
        before = outcome(self.decided)
        self.now_s += seconds
        self.decide()
        if first_s is None or self.now_s < first_s:
            assert outcome(self.decided) == before, "time changes only what has said when"

    @invariant()
    @precondition(lambda self: hasattr(self, "decided"))
    def what_is_allocated_stays_listed(self) -> None:
        ours = {(entry.resource, entry.device) for entry in self.picture.ledger.entries}
        assert ours <= {(name, device) for name, devices in listed(self.decided).items() for device in devices}

    @invariant()
    @precondition(lambda self: hasattr(self, "decided"))
    def deciding_twice_is_deciding_once(self) -> None:
        once, again = self.decided, self.decided_again(self.decided)
        assert outcome(again) == outcome(once)
        assert not again.memory.withdrawal.grew
        assert (again.again_at_s, again.judged_again_at_s) == (once.again_at_s, once.judged_again_at_s)

    def decided_again(self, decided: NodeDecisions) -> NodeDecisions:
        return decide(self.picture, decided.memory, self.terms, self.now_s, BEGINNING)


TestPictures = Pictures.TestCase
TestPictures.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)


@given(unread=st.sampled_from(["vendor", "device", "class", "driver", "iommu_group"]), gpu=GPUS)
@settings(max_examples=examples(20), deadline=None)
def test_what_cannot_be_read_takes_nothing_from_the_lists(unread: str, gpu: PciAddress) -> None:
    before = decided_at(observed())
    kernel = build_host(HOST)
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{gpu}/{unread}"), errno.EIO)
    picture = with_answer(with_host(observed(), with_users(kernel, scan(kernel, facts_of(as_built)))), 1.0)
    after = decided_at(picture, 1.0, before.memory)
    assert ids(before) <= ids(after)
    assert after.memory.withdrawal.all == frozenset()

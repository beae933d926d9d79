"""The units that are changed now: a table of situations, and laws over sequences of events."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.change.attempts import (
    FIRST_PAUSE_S,
    MOST_PAUSE_AFTER_ROLLBACK_S,
    MOST_PAUSE_S,
    Attempts,
    Circumstances,
    fingerprint,
)
from gpuvirt.model.change.desired import DesiredDriver, desired_drivers
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.change.state import Account, DriverJournal
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node.decisions import NodeDecisions
from gpuvirt.model.node.duechanges import (
    Difference,
    EarlierFailure,
    GateUse,
    Surroundings,
    UnitDecision,
    attempts_after,
    compare,
    decide_changes,
)
from gpuvirt.model.node.offering import departures
from gpuvirt.model.node.picture import NodePicture
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import A10, RTX, T4
from tests.agent.node.pictures import (
    A10_NAME,
    HOSTS,
    VGPUS,
    decided_at,
    desiring,
    facts_of,
    observed,
    with_answer,
    with_host,
)
from tests.thoroughness import examples

OF_A10, OF_T4, OF_RTX = UnitId(A10), UnitId(T4), UnitId(RTX)
REFUSED = Reason(ReasonCode.STEP_FAILED, A10, "was refused")
NO_PODS: Allocations = {}


class Situation(msgspec.Struct, frozen=True):
    """The observations of a node, the decisions for it, and the attempts so far."""

    picture: NodePicture
    decided: NodeDecisions
    pods: Allocations | Unknown = msgspec.field(default_factory=dict)
    failed: Mapping[UnitId, EarlierFailure] = msgspec.field(default_factory=dict)
    observations: int = 1
    attempts: Mapping[UnitId, Attempts] = msgspec.field(default_factory=dict)

    @property
    def difference(self) -> Difference:
        assert self.picture.inventory is not None
        return compare(self.picture.inventory, self.decided.desired, DriverJournal())

    def decisions(self, now_s: float) -> Mapping[UnitId, UnitDecision]:
        assert self.picture.inventory is not None
        counted = departures(self.picture, self.decided.memory.withdrawal)
        vgpus = self.decided.desired.vgpus
        account = Account(self.pods)
        surroundings = Surroundings(self.picture.inventory, account, counted, vgpus, self.failed, self.observations)
        return decide_changes(self.difference, surroundings, self.attempts, now_s)

    def after(self, unit: UnitId, attempts: Attempts) -> "Situation":
        return replace(self, attempts={**self.attempts, unit: attempts})

    def attempted(self, now_s: float, unit: UnitId = OF_A10, *, rolled_back: bool = False) -> "Situation":
        """Return the situation after a change of a unit was refused, or has failed and was rolled back."""
        decision = self.decisions(now_s)[unit]
        assert decision.begins
        running = decision.attempts.rolling_back() if rolled_back else decision.attempts
        outcome = Outcome((replace(REFUSED, subject=unit),))
        return self.after(unit, running.concluded(outcome).changed(self.observations, None).ended(now_s))


def desiring_node(mode: DesiredMode, config: str | None = None) -> Situation:
    """Return a node on which a mode is desired, and whose kubelet has answered after the withdrawals."""
    before = decided_at(observed())
    picture = desiring(observed(), mode, config)
    decided = decided_at(picture, 1.0, before.memory)
    return Situation(with_answer(picture, 2.0), decided)


def to_native() -> Situation:
    return desiring_node(DesiredMode.CONTAINER)


def to_fewer_vgpus() -> Situation:
    return desiring_node(DesiredMode.VGPU, "T4-16Q")


def to_passthrough() -> Situation:
    """Return a node on which one GPU is on its native driver, and must leave it."""
    picture = desiring(observed(HOSTS[4]), DesiredMode.UNMANAGED, gpus={RTX: "passthrough"})
    return Situation(with_answer(picture, 2.0), decided_at(picture, 1.0))


# --- what begins


def test_nothing_is_decided_for_units_in_their_desired_state() -> None:
    assert desiring_node(DesiredMode.UNMANAGED).decisions(3.0) == {}


def test_units_that_differ_are_changed_once_the_kubelet_has_answered() -> None:
    situation = to_native()
    assert {
        unit for unit, decision in situation.decisions(3.0).items() if decision.begins
    } == situation.difference.open.keys()
    assert OF_A10 in situation.difference.drivers
    assert OF_T4 not in situation.difference.drivers
    assert OF_T4 in situation.difference.open


@pytest.mark.parametrize("unit", [OF_A10, OF_T4], ids=["driver", "vGPUs"])
def test_while_allocations_are_unknown_the_unit_is_drained_and_says_why(unit: UnitId) -> None:
    decision = replace(to_native(), pods=Unknown()).decisions(3.0)[unit]
    assert (decision.begins, decision.gate) == (False, GateUse.DRAINED)
    assert unit in decision.intent
    assert decision.attempts.outcome is not None
    drivers, vgpus = decision.attempts.outcome.drivers, decision.attempts.outcome.vgpus
    assert (bool(drivers), bool(vgpus)) == (unit == OF_A10, unit == OF_T4), "only what waits has a reason"
    assert [reason.code for reason in decision.attempts.noted] == [ReasonCode.ALLOCATIONS_UNKNOWN]


def test_a_gpu_leaves_its_native_driver_although_allocations_are_unknown() -> None:
    """The change itself looks for processes, and asks the kubelet's newest record."""
    before = replace(to_passthrough(), pods=Unknown())
    assert before.difference.drivers == {OF_RTX}
    assert before.decisions(3.0)[OF_RTX].begins


@pytest.mark.parametrize(
    "counted",
    [
        frozenset({(A10_NAME, DeviceId(A10)), (VGPUS, DeviceId("68c6dc70-802e-56ec-bdab-34acfa7df8e2"))}),
        Unread(HostPath("kubelet.sock")),
    ],
    ids=["counted", "unknown"],
)
def test_a_function_that_the_kubelet_may_count_keeps_its_driver(
    counted: frozenset[tuple[ResourceName, DeviceId]] | Unread,
) -> None:
    situation = to_native()
    ledger = situation.picture.ledger
    assert ledger.account is not None
    counting = replace(ledger, account=replace(ledger.account, counted=counted))
    decisions = replace(situation, picture=replace(situation.picture, ledger=counting)).decisions(3.0)
    decision = decisions[OF_A10]
    assert (decision.begins, decision.gate) == (False, GateUse.DRAINED)
    assert {reason.code for reason in decision.attempts.noted} == {ReasonCode.STILL_ALLOCATABLE}
    assert decisions[OF_T4].begins, "it has its driver; a change of vGPUs finds out itself what is offered"


def test_vgpus_are_changed_only_by_an_observation_after_the_last_change() -> None:
    situation = to_fewer_vgpus().attempted(3.0, OF_T4)
    later_s = 3.0 + MOST_PAUSE_S
    assert not situation.decisions(later_s)[OF_T4].begins
    assert replace(situation, observations=2).decisions(later_s)[OF_T4].begins


def test_a_running_change_is_left_alone() -> None:
    situation = to_native()
    decisions = situation.decisions(3.0)
    running = replace(situation, attempts={unit: decision.attempts for unit, decision in decisions.items()})
    for pods in (NO_PODS, Unknown()):
        for unit, decision in replace(running, pods=pods).decisions(3.0 + MOST_PAUSE_AFTER_ROLLBACK_S).items():
            assert (decision.begins, decision.gate) == (False, GateUse.AS_IS)
            assert decision.attempts == running.attempts[unit]


# --- when a failed change is tried again


def test_in_the_same_circumstances_pauses_grow_up_to_a_limit() -> None:
    situation, now_s, pauses = to_native(), 3.0, list[float]()
    for _ in range(9):
        situation = situation.attempted(now_s)
        again_s = situation.attempts[OF_A10].again_at_s
        pauses.append(again_s - now_s)
        assert not situation.decisions(again_s - 0.1)[OF_A10].begins
        now_s = again_s
    assert pauses == [*(FIRST_PAUSE_S * 2**number for number in range(6)), *[MOST_PAUSE_S] * 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda situation: replace(situation, pods={A10: ("ns/pod",)}),
        lambda situation: replace(situation, picture=with_host(situation.picture, facts_of(HOSTS[5]))),
        lambda situation: replace(situation, picture=with_host(situation.picture, facts_of(HOSTS[3]))),
    ],
    ids=["a pod", "a process", "the host"],
)
@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_change_of_circumstances_calls_for_an_attempt_at_once(
    change: Callable[[Situation], Situation], *, rolled_back: bool, request: pytest.FixtureRequest
) -> None:
    """After a rollback the state of the host does not count: the attempt itself has changed it."""
    situation = change(to_native().attempted(3.0, rolled_back=rolled_back))
    is_of_host = "the host" in request.node.callspec.id
    assert situation.decisions(3.1)[OF_A10].begins is not (rolled_back and is_of_host)


def test_after_a_rollback_pauses_grow_further() -> None:
    attempts = Attempts(pauses=7, rolled_back=True)
    assert attempts.ended(0.0).again_at_s == FIRST_PAUSE_S * 2**7
    assert replace(attempts, pauses=30).ended(0.0).again_at_s == MOST_PAUSE_AFTER_ROLLBACK_S
    assert replace(attempts, pauses=30, rolled_back=False).ended(0.0).again_at_s == MOST_PAUSE_S


def test_a_change_of_circumstances_begins_the_pauses_again() -> None:
    situation = to_native().attempted(3.0).attempted(8.0)
    assert situation.attempts[OF_A10].pauses == 2
    with_pod = replace(situation, pods={A10: ("ns/pod",)}).attempted(8.1)
    assert with_pod.attempts[OF_A10].again_at_s == 8.1 + FIRST_PAUSE_S


@pytest.mark.parametrize("left", ["rolled back", "blocked"])
def test_the_reason_of_a_failed_change_of_vgpus_stays_while_allocations_are_unknown(left: str) -> None:
    situation = to_fewer_vgpus().attempted(3.0, OF_T4)
    before = situation.attempts[OF_T4]
    after = before.rolling_back() if left == "rolled back" else replace(before, blocked_at="remove a vGPU")
    unknown = replace(situation, pods=Unknown(), observations=2)
    assert unknown.after(OF_T4, after).decisions(4.0)[OF_T4].attempts.noted == before.noted
    assert unknown.decisions(4.0)[OF_T4].attempts.noted != before.noted


# --- what an earlier agent has left


def held(situation: Situation, now_s: float = 3.0) -> EarlierFailure:
    """Return the failure of an earlier agent in these circumstances."""
    tried_on = situation.decisions(now_s)[OF_A10].attempts.tried_on
    assert tried_on is not None
    return EarlierFailure(REFUSED, fingerprint(tried_on))


def test_the_failure_of_an_earlier_agent_counts_as_an_attempt_in_the_same_circumstances() -> None:
    situation = to_native()
    decision = replace(situation, failed={OF_A10: held(situation)}).decisions(3.0)[OF_A10]
    assert (decision.begins, decision.is_compared, decision.attempts.noted) == (False, True, (REFUSED,))
    after = situation.after(OF_A10, decision.attempts)
    assert not after.decisions(3.0 + FIRST_PAUSE_S - 0.1)[OF_A10].begins
    assert after.decisions(3.0 + FIRST_PAUSE_S)[OF_A10].begins


@pytest.mark.parametrize(
    "failure",
    [EarlierFailure(REFUSED, fingerprint(Circumstances("others"))), EarlierFailure(REFUSED, None)],
)
def test_in_other_circumstances_it_is_forgotten(failure: EarlierFailure) -> None:
    decision = replace(to_native(), failed={OF_A10: failure}).decisions(3.0)[OF_A10]
    assert (decision.begins, decision.is_compared) == (True, True)


def test_its_gate_stays_held_until_circumstances_are_known() -> None:
    situation = to_native()
    unknown = replace(situation, failed={OF_A10: held(situation)}, pods=Unknown())
    decision = unknown.decisions(3.0)[OF_A10]
    assert (decision.begins, decision.is_compared, decision.gate) == (False, False, GateUse.AS_IS)


def test_the_gate_of_a_unit_in_its_desired_state_is_opened() -> None:
    situation = replace(desiring_node(DesiredMode.UNMANAGED), failed={OF_A10: EarlierFailure(REFUSED, "x")})
    assert situation.decisions(3.0) == {OF_A10: UnitDecision(Attempts(), gate=GateUse.OPEN, is_compared=True)}


# --- a unit that has reached its desired state, or has none any more


def test_the_reasons_of_a_unit_that_has_reached_its_desired_state_are_gone() -> None:
    failed = to_native().attempted(3.0)
    done = replace(desiring_node(DesiredMode.UNMANAGED), attempts=failed.attempts)
    decision = done.decisions(4.0)[OF_A10]
    assert (decision.gate, decision.attempts.noted, decision.attempts.outcome) == (GateUse.OPEN, (), None)
    again = replace(to_native(), attempts={OF_A10: decision.attempts})
    assert again.decisions(4.1)[OF_A10].begins, "any later circumstances count as a change"


def test_a_rollback_is_remembered_while_the_same_state_is_desired() -> None:
    desired = {A10: object()}
    attempts = Attempts(Circumstances(desired), rolled_back=True)
    assert attempts.forgotten(desired) == attempts
    assert attempts.forgotten() == Attempts()
    assert replace(attempts, rolled_back=False).forgotten(desired) == Attempts()


def test_attempts_at_a_unit_that_is_gone_are_kept_only_while_they_run() -> None:
    picture = observed()
    assert picture.inventory is not None
    gone, running = UnitDecision(Attempts()), UnitDecision(Attempts(running=True))
    decisions = {UnitId("0000:01:00.0"): gone, UnitId("0000:02:00.0"): running, OF_A10: gone}
    assert attempts_after(decisions, picture.inventory).keys() == {UnitId("0000:02:00.0"), OF_A10}


# --- laws over sequences

MODES = st.sampled_from([DesiredMode.UNMANAGED, DesiredMode.CONTAINER, DesiredMode.PASSTHROUGH, DesiredMode.VGPU])
CONFIGS = st.sampled_from(["T4-8Q", "T4-16Q", None])


class Reconciling(RuleBasedStateMachine):
    """A node over time, as a reconciler without any host carries it out."""

    @initialize(failed=st.booleans())
    def start(self, failed: bool) -> None:
        self.now_s = 1.0
        self.situation = desiring_node(DesiredMode.UNMANAGED)
        if failed:
            self.situation = replace(self.situation, failed={OF_A10: EarlierFailure(REFUSED, "x")})
        self.compared: set[UnitId] = set()
        self.began: dict[UnitId, tuple[Circumstances | None, float]] = {}
        """The circumstances and the end of the last change of each unit, until something else than time has changed."""
        self.act()

    def decide(self, mode: DesiredMode | None = None, config: str | None = None) -> None:
        picture = self.situation.picture
        if mode is not None:
            picture = desiring(picture, mode, config)
        decided = decided_at(picture, self.now_s, self.situation.decided.memory)
        self.situation = replace(self.situation, picture=picture, decided=decided)

    def act(self) -> None:
        """Carry out what is decided, and see that it keeps the laws."""
        before, decisions = self.situation, self.situation.decisions(self.now_s)
        is_open = before.difference.open
        for unit, decision in decisions.items():
            was = before.attempts.get(unit, Attempts())
            assert decision.attempts.running == (was.running or decision.begins)
            assert not (decision.begins and was.running), "one change of a unit at a time"
            assert not (decision.begins and unit not in is_open), "nothing to change"
            assert decision.gate is not GateUse.DRAINED or (unit in is_open and not was.running)
            assert decision.gate is not GateUse.OPEN or unit not in is_open
            assert not (decision.is_compared and unit in self.compared), "it was compared before"
            if decision.begins:
                assert not (isinstance(before.pods, Unknown) and self.takes(unit)), "a pod may have it"
                self.verify_pause(unit, decision)
            if decision.is_compared:
                self.compared.add(unit)
        assert before.picture.inventory is not None
        failed = {unit: failure for unit, failure in before.failed.items() if unit not in self.compared}
        attempts = attempts_after(decisions, before.picture.inventory)
        self.situation = replace(before, attempts=attempts, failed=failed)

    def takes(self, unit: UnitId) -> bool:
        """Return whether a change takes devices away that pods may have."""
        difference, vgpus = self.situation.difference, self.situation.decided.desired.vgpus
        drivers = desired_drivers(difference.open[unit]).values() if unit in difference.drivers else ()
        return DesiredDriver.NATIVE in drivers or any(vgpus.plan_of(gpu).destroys for gpu in difference.open[unit])

    def verify_pause(self, unit: UnitId, decision: UnitDecision) -> None:
        if (last := self.began.pop(unit, None)) is not None:
            tried_on, ended_s = last
            is_same = tried_on == decision.attempts.tried_on
            assert not is_same or self.now_s >= ended_s + FIRST_PAUSE_S, "the pause was not kept"

    @rule(mode=MODES, config=CONFIGS)
    def another_state_is_desired(self, mode: DesiredMode, config: str | None) -> None:
        self.began.clear()
        self.decide(mode, config)
        self.act()

    @rule(happens=st.sampled_from(HOSTS))
    def the_host_is_observed(self, happens: Callable[[SimKernel], None]) -> None:
        picture = with_host(self.situation.picture, facts_of(happens))
        self.situation = replace(self.situation, picture=picture, observations=self.situation.observations + 1)
        self.began.clear()
        self.decide()
        self.act()

    @rule()
    def the_kubelet_answers(self) -> None:
        self.situation = replace(self.situation, picture=with_answer(self.situation.picture, self.now_s), pods=NO_PODS)
        self.began.clear()
        self.act()

    @rule(pods=st.sampled_from([NO_PODS, {A10: ("ns/pod",)}, Unknown()]))
    def allocations_are_known_or_not(self, pods: Allocations | Unknown) -> None:
        self.situation = replace(self.situation, pods=pods)
        self.began.clear()
        self.act()

    @rule(seconds=st.sampled_from([0.1, 4.9, 5.0, 60.0, MOST_PAUSE_S, MOST_PAUSE_AFTER_ROLLBACK_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.act()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans(), rolls_back=st.booleans(), blocked=st.booleans())
    def a_change_ends(self, data: st.DataObject, *, fails: bool, rolls_back: bool, blocked: bool) -> None:
        unit = data.draw(st.sampled_from(self.running))
        attempts = self.situation.attempts[unit]
        if rolls_back:
            attempts = attempts.rolling_back()
        attempts = attempts.concluded(Outcome((REFUSED,)) if fails else Outcome())
        attempts = attempts.changed(self.situation.observations, "unbind it" if blocked else None).ended(self.now_s)
        self.situation = self.situation.after(unit, attempts)
        self.began[unit] = attempts.tried_on, self.now_s
        self.act()

    @precondition(lambda self: bool(self.situation.attempts))
    @rule(data=st.data())
    def a_blocked_change_rolls_back_late(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.situation.attempts)))
        self.situation = self.situation.after(unit, self.situation.attempts[unit].rolling_back())
        self.act()

    @rule(gpu=st.sampled_from([A10, T4]))
    def nvidia_smi_is_blocked(self, gpu: PciAddress) -> None:
        attempts = self.situation.attempts.get(UnitId(gpu), Attempts())
        outcome = Outcome(vgpus={gpu: (refusals.blocked(gpu, "nvidia-smi"),)})
        self.situation = self.situation.after(UnitId(gpu), attempts.concluded(outcome))
        self.act()

    @property
    def running(self) -> list[UnitId]:
        return sorted(unit for unit, attempts in self.situation.attempts.items() if attempts.running)

    @invariant()
    @precondition(lambda self: hasattr(self, "situation"))
    def deciding_again_at_once_begins_nothing(self) -> None:
        decisions = self.situation.decisions(self.now_s)
        assert not [unit for unit, decision in decisions.items() if decision.begins]
        assert {unit: decision.attempts for unit, decision in decisions.items()} == self.situation.attempts

    @invariant()
    @precondition(lambda self: hasattr(self, "situation"))
    def what_differs_is_changed_in_the_end(self) -> None:
        """Once the kubelet has answered and the longest pause is over, each unit with work to do is changed."""
        situation = replace(
            self.situation,
            picture=with_answer(self.situation.picture, self.now_s + 1),
            pods=NO_PODS,
            failed={},
            observations=self.situation.observations + 1,
        )
        decisions = situation.decisions(self.now_s + 1 + MOST_PAUSE_AFTER_ROLLBACK_S)
        vgpus = situation.decided.desired.vgpus
        for unit, desired in situation.difference.open.items():
            has_steps = any(vgpus.plan_of(gpu).steps for gpu in desired)
            if unit in situation.difference.drivers or has_steps:
                assert decisions[unit].begins or decisions[unit].attempts.running
            else:
                assert decisions[unit].attempts.outcome is not None, "it says why nothing is done"

    @invariant()
    @precondition(lambda self: hasattr(self, "situation"))
    def notes_are_those_of_open_units(self) -> None:
        for unit, attempts in self.situation.attempts.items():
            assert unit in self.situation.difference.open or attempts.running or not attempts.noted
            assert attempts.outcome is None or unit in self.situation.difference.open


TestReconciling = Reconciling.TestCase
TestReconciling.settings = settings(max_examples=examples(100), stateful_step_count=25, deadline=None)

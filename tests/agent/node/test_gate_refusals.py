"""Each file of a gate refuses by itself: the lock before the record is written, and a record that was just damaged."""

import errno
from pathlib import Path
from time import monotonic  # noqa: TID251  the lines of allocations carry it

import pytest

from gpuvirt.agent.change.gate import drainrequest, gatefiles
from gpuvirt.agent.change.gate.drainrequest import DrainRequest, _answer
from gpuvirt.agent.change.gate.gate import Gate, UnitBusyError, UnitUnsettledError
from gpuvirt.agent.change.gate.gatelock import GateFailedError, UnitAllocatingError, UnitBlockedError, why_not_passed
from gpuvirt.agent.change.gate.gaterecord import (
    AccountReading,
    Damaged,
    GateOwner,
    GateRecord,
    GateState,
    IllegalMoveError,
    allocation,
)
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode, refusals
from tests.agent.node.diskfaults import failing
from tests.agent.node.gateholders import SLOT, draining, locked

OTHER_SLOT = "0000:ca:00"


def test_nothing_is_allocated_while_a_change_reads_the_allocations_before_it_begins(tmp_path: Path) -> None:
    """The record is still open then: the change would miss an allocation whose line is added after the reading."""
    gate, lines = Gate(tmp_path), tmp_path / f"{SLOT}.lock"
    with gate.allocation({SLOT: ["first"]}):
        pass
    assert gate.state(SLOT) is GateState.OPEN
    with locked(lines), pytest.raises(UnitBusyError):
        gate.allocation({SLOT: ["second"]}).__enter__()
    assert [line.split()[-1] for line in lines.read_text().splitlines()] == ["first"]


@pytest.mark.parametrize(
    ("error", "code", "seen"),
    [
        (UnitBlockedError("blocked", "unbind it"), ReasonCode.WRITE_BLOCKED, "unbind it"),
        (UnitAllocatingError("x", "/locks/x.lock"), ReasonCode.UNIT_BUSY, "/locks/x.lock"),
        (UnitUnsettledError("just allocated"), ReasonCode.ADMISSION_UNSETTLED, "just allocated"),
        (GateFailedError("/locks/x.lock", OSError(errno.EROFS, "")), ReasonCode.GATE_FAILED, "EROFS"),
        (UnitBusyError("another process changes it"), ReasonCode.UNIT_BUSY, "another process changes it"),
    ],
)
def test_what_does_not_pass_a_gate_has_a_reason(error: UnitBusyError, code: ReasonCode, seen: str) -> None:
    reason = why_not_passed("0000:65:00.0", error)
    assert reason.code is code
    assert seen in reason.text


def test_a_drain_of_several_slots_drains_all_or_none(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with draining(tmp_path, OTHER_SLOT):
        with pytest.raises(UnitBusyError):
            gate.drain("x", (SLOT, OTHER_SLOT), "unbind it")
        assert (gate.state(SLOT), gate.draining) == (GateState.OPEN, {})


def test_a_record_that_was_just_damaged_is_not_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have recorded an allocation or a change that nothing else shows yet."""
    gate, path = Gate(tmp_path), tmp_path / f"{SLOT}.json"
    path.write_bytes(b"torn")
    gate.settle(SLOT)
    assert isinstance(gate.read(SLOT), Damaged)
    monkeypatch.setattr(gatefiles, "monotonic", lambda: monotonic() + gatefiles.NEW_S)
    gate.settle(SLOT)
    assert gate.state(SLOT) is GateState.OPEN


def test_a_record_that_was_just_damaged_refuses_a_change_after_settled_allocations(tmp_path: Path) -> None:
    gate, now_s = Gate(tmp_path), monotonic()
    (tmp_path / f"{SLOT}.lock").write_text(allocation("gpu", GateOwner(1, 1), now_s - 15))
    (tmp_path / f"{SLOT}.json").write_bytes(b"torn")
    readings = [AccountReading(now_s, frozenset({"gpu"}))]
    with (
        pytest.raises(UnitUnsettledError, match="can't be decoded"),
        gate.change("x", lambda: (SLOT,), lambda: readings),
    ):
        pass


def test_no_step_begins_in_an_open_gate() -> None:
    with pytest.raises(IllegalMoveError, match="a step can begin"):
        GateRecord("boot").in_step("unbind it")


def test_a_command_takes_the_agents_refusal_as_its_answer(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    request = DrainRequest(UnitId("x"), (OTHER_SLOT, SLOT), "unbind it", {})
    refusal = refusals.changing("x", "the agent keeps it")
    gate.drain(request.unit, request.slots, request.intent)
    Gate(tmp_path).answer(SLOT, 1, refusal)
    assert _answer(gate, request) == refusal
    gate.stop_draining(request.slots)


def test_a_damaged_record_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainrequest, "ANSWER_S", 0.1)
    gate, path = Gate(tmp_path), tmp_path / f"{SLOT}.json"
    gate.drain("x", (SLOT,), "unbind it")
    path.write_bytes(b"torn")
    reason = _answer(gate, DrainRequest(UnitId("x"), (SLOT,), "unbind it", {}))
    assert reason is not None
    assert reason.code is ReasonCode.AGENT_SILENT
    gate.stop_draining((SLOT,))
    assert isinstance(gate.read(SLOT), Damaged)


def test_the_agent_answers_only_the_request_that_waits(tmp_path: Path) -> None:
    gate, agent, path = Gate(tmp_path), Gate(tmp_path), tmp_path / f"{SLOT}.json"
    refusal = refusals.changing("x", "the agent keeps it")
    gate.drain("x", (SLOT,), "unbind it")
    before = path.read_bytes()
    agent.answer(SLOT, 2, None)
    assert path.read_bytes() == before
    agent.answer(SLOT, 1, refusal)
    before = path.read_bytes()
    agent.answer(SLOT, 1, None)
    assert path.read_bytes() == before
    path.write_bytes(b"torn")
    agent.answer(SLOT, 1, None)
    assert path.read_bytes() == b"torn"


def test_no_change_begins_whose_record_can_not_be_written(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with gate.allocation({SLOT: ["gpu"]}):
        pass
    with failing(tmp_path, errno.EROFS) as faults:
        faults.only = "json"
        with pytest.raises(GateFailedError), gate.change("x", lambda: (SLOT,)):
            pytest.fail("the change has begun without a record")


@pytest.mark.parametrize("drained", [False, True])
def test_a_change_that_fails_with_an_error_stays_unsettled(tmp_path: Path, *, drained: bool) -> None:
    """The host is as its last step left it: nothing is allocated until it was observed."""
    gate = Gate(tmp_path)
    if drained:
        gate.drain("x", (SLOT,), "unbind it")
    with pytest.raises(KeyError), gate.change("x", lambda: (SLOT,)):
        raise KeyError("a bug")
    assert gate.state(SLOT) is GateState.SETTLING

"""A gate's file that can't be examined, read or written refuses: it never counts as missing, current or written."""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from gpuvirt.agent.change.gate import gatefiles
from gpuvirt.agent.change.gate.agentlock import no_plugin
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, Membership, NoGate, beside_agents, has_member
from gpuvirt.agent.change.gate.gate import Gate, Gates, gate_at, plugin_gates
from gpuvirt.agent.change.gate.gatelock import Anchor, GateFailedError, UnitBusyError, is_current
from gpuvirt.agent.change.gate.gaterecord import GateState
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.diskfaults import failing
from tests.agent.node.gateholders import SLOT, draining

Act = Callable[[], object]
SECOND = "0000:ca:00"
REQUEST = DrainRequest(UnitId("gpu"), (SLOT,), "unbind", {})


class Fails(Protocol):
    """A system call that fails."""

    def __call__(self, *_: object) -> int: ...


def failing_with(number: int) -> Fails:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_record_that_cannot_be_read_is_not_an_open_gate(tmp_path: Path) -> None:
    """Another process may be changing the slot."""
    gate = Gate(tmp_path)
    gate.path_of(SLOT, "json").mkdir(parents=True)
    for act in (
        lambda: gate.read(SLOT),
        lambda: gate.state(SLOT),
        lambda: gate.allocation({SLOT: ["gpu"]}),
        lambda: gate.change("x", lambda: (SLOT,)).__enter__(),
    ):
        with pytest.raises(GateFailedError, match="EISDIR"):
            act()
    assert not gate.path_of(SLOT, "lock").read_text()


def test_the_gates_of_a_plugin_are_left_out_only_where_the_kubelets_folder_is_certainly_missing(tmp_path: Path) -> None:
    (folder := tmp_path / "device-plugins").symlink_to(folder)
    gates = Gates(Gate(tmp_path / "gate"), folder, Anchor(tmp_path / "anchor"))
    agents = Agents(tmp_path / "agent", lambda: None)
    for act in (lambda: gates.all, lambda: beside_agents(gates, agents, REQUEST).__enter__()):
        with pytest.raises(GateFailedError, match="ELOOP"):
            act()


def test_the_lines_of_allocations_that_cannot_be_read_refuse_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path)
    with monkeypatch.context() as faults:
        faults.setattr(os, "pread", failing_with(errno.EIO))
        with pytest.raises(GateFailedError, match=rf"{SLOT}\.lock: EIO"), gate.change("x", lambda: (SLOT,)):
            pass
    with gate.change("x", lambda: (SLOT,)):
        pass


def test_a_line_that_is_written_in_part_refuses_the_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change could not tell from the rest of the line which device is allocated."""
    gate, write = Gate(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(GateFailedError, match="ENOSPC"):
        gate.allocation({SLOT: ["gpu"]})


def test_the_age_of_damage_that_cannot_be_noted_refuses(tmp_path: Path) -> None:
    gate, path = Gate(tmp_path), tmp_path / f"{SLOT}.json"
    path.write_bytes(b"torn")
    path.with_name(f"{path.name}{gatefiles.SUFFIX}").mkdir()
    with pytest.raises(GateFailedError, match="EISDIR"), gate.change("x", lambda: (SLOT,)):
        pass


def test_a_file_that_cannot_be_examined_is_neither_current_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file, pytest.raises(GateFailedError, match="ENOTDIR"):
        is_current(file.fileno(), tmp_path / "file/lock")


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for act in (Gate(tmp_path / "file").states, Gate(tmp_path / "file").states_by_record):
        with pytest.raises(GateFailedError, match="ENOTDIR"):
            act()
    assert Gate(tmp_path / "missing").states() == {}


def test_a_folder_that_cannot_be_opened_does_not_lack_its_agent(tmp_path: Path) -> None:
    with pytest.raises(GateFailedError, match="ENOENT"), no_plugin(tmp_path / "missing"):
        pass
    gate = Gate(tmp_path)
    assert not has_member(gate)
    with failing(tmp_path, errno.EACCES), pytest.raises(GateFailedError, match="EACCES"):
        has_member(gate)


@pytest.mark.parametrize("may_lack", [False, True], ids=["an agent", "a drop-in plugin"])
def test_an_agent_that_cannot_take_part_reports_why(tmp_path: Path, *, may_lack: bool) -> None:
    (tmp_path / "file").touch()
    membership = Membership(Gate(tmp_path / "file"), may_lack=may_lack)
    membership.join()
    problem = membership.problem
    assert problem is not None
    assert (problem.code, "ENOTDIR" in problem.text) == (ReasonCode.GATE_FAILED, True)
    assert ("can't lock its devices" in problem.text) == may_lack
    assert membership.gate == (NoGate(problem) if may_lack else membership.own)
    (tmp_path / "file").unlink()
    membership.join()
    assert (membership.problem, membership.gate) == (None, membership.own)
    membership.leave()


@pytest.mark.parametrize(("name", "number"), [("open", errno.EACCES), ("fcntl", errno.ENOLCK)])
def test_an_anchor_that_cannot_be_locked_refuses_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    with ExitStack() as stack:
        monkeypatch.setattr(os if name == "open" else fcntl, name, failing_with(number))
        with pytest.raises(GateFailedError, match=rf"null: {errno.errorcode[number]}"):
            Anchor(tmp_path / "null").lock(stack, "x", (SLOT,))


def test_a_slot_that_cannot_be_kept_drained_is_not_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tmp_path)
    with monkeypatch.context() as faults:
        faults.setattr(os, "dup", failing_with(errno.EMFILE))
        with pytest.raises(GateFailedError, match=rf"{SLOT}\.owner: EMFILE"):
            gate.drain("x", (SLOT,), "unbind it")
    assert gate.draining == {}
    gate.settle(SLOT)
    assert gate.state(SLOT) is GateState.OPEN


def test_a_drain_that_fails_in_one_of_the_folders_ends_in_the_other(tmp_path: Path) -> None:
    (tmp_path / "device-plugins").mkdir()
    gates = Gates(Gate(tmp_path / "locks"), tmp_path / "device-plugins", Anchor(tmp_path / "null"))
    with draining(plugin_gates(gates.device_plugins)):
        with pytest.raises(UnitBusyError):
            gates.drain("x", (SLOT, SECOND), "unbind it")
        assert (gates.host.states(), gates.host.draining) == ({SLOT: GateState.OPEN, SECOND: GateState.OPEN}, {})
        assert gate_at(plugin_gates(gates.device_plugins)).draining == {}


def test_a_step_that_the_kernel_blocks_needs_no_record(tmp_path: Path) -> None:
    """The event loop records it while the thread of the change sleeps, and goes on without the record."""
    gate = Gate(tmp_path)
    with gate.change("x", lambda: (SLOT,)) as passed:
        passed.pause()
        passed.note("unbind it")
        with failing(tmp_path, errno.EROFS) as faults:
            faults.only = "json"
            passed.block()
            passed.unblock()
    assert gate.state(SLOT) is GateState.OPEN


class Ends:
    """Ends a change when another process tries a lock, a moment before that try."""

    def __init__(self, kind: str, end: Act) -> None:
        self._kind, self._end = kind, end
        self._flock = fcntl.flock

    def flock(self, fd: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(self._kind):  # noqa: PTH115  a descriptor's
            self._kind = "no file any more"
            self._end()
        self._flock(fd, operation)


def test_a_change_that_ends_while_its_locks_are_tried_is_not_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as change:
        change.enter_context(Gate(tmp_path).change("x", lambda: (SLOT,)))
        monkeypatch.setattr(fcntl, "flock", Ends(".owner", change.close).flock)
        assert Gate(tmp_path).state(SLOT) is GateState.OPEN

"""The waits for a gate: what a change finds at a lock that allocations share, and when a wait for a lock ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate import gatelock
from gpuvirt.agent.change.gate.drainrequest import ANSWER_S, DrainRequest, _answer, draining
from gpuvirt.agent.change.gate.gate import Gate, UnitBlockedError, UnitBusyError
from gpuvirt.agent.change.gate.gatelock import tries, try_lock, why_not_passed
from gpuvirt.agent.change.gate.gaterecord import GateState
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

GPU = PciAddress("0000:65:00.0")
SLOT = slot_of(GPU)
CONTAINER = Settings(mode=DesiredMode.CONTAINER)


@contextmanager
def locked(path: Path, kind: int) -> Iterator[int]:
    """Have a lock as another process would: locks belong to the open file, not to the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, kind)
    try:
        yield fd
    finally:
        os.close(fd)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(gate: Gate, *, by_drain: bool) -> UnitBusyError:
    """Return the error of a drain or a change of the slot."""
    if by_drain:
        with pytest.raises(UnitBusyError) as error:
            gate.drain(GPU, (SLOT,), "remove a vGPU", patience_s=0.0)
    else:
        with pytest.raises(UnitBusyError) as error:
            gate.change(GPU, lambda: (SLOT,)).__enter__()
    return error.value


@pytest.mark.parametrize("by_drain", [True, False], ids=["drain", "change"])
def test_a_device_that_is_being_allocated_is_no_blocked_change(tmp_path: Path, by_drain: bool) -> None:
    """An on-demand creation may take longer than a command waits for the lock."""
    gate = Gate(tmp_path)
    with Gate(tmp_path).creation(SLOT, "v1-1"):
        before = contents(tmp_path)
        error = refusal(gate, by_drain=by_drain)
        assert not isinstance(error, UnitBlockedError)
        reason = why_not_passed(GPU, error)
        assert reason.code is ReasonCode.UNIT_BUSY
        assert "a device of its PCI slot is being allocated now" in reason.text
        assert "try the command again" in reason.text
        assert str(gate.path_of(SLOT, "lock")) in reason.text
        assert contents(tmp_path) == {**before, f"{SLOT}.owner": b""}, "nothing is written"
        assert (gate.state(SLOT), gate.draining) == (GateState.OPEN, {})
        with locked(gate.path_of(SLOT, "owner"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass
        with Gate(tmp_path).allocation({SLOT: ["v1-2"]}):
            pass
    with gate.change(GPU, lambda: (SLOT,)):
        assert gate.state(SLOT) is GateState.APPLYING


@pytest.mark.parametrize("by_drain", [True, False], ids=["drain", "change"])
def test_a_lock_that_no_allocation_can_share_is_a_blocked_change(tmp_path: Path, by_drain: bool) -> None:
    gate = Gate(tmp_path)
    with locked(gate.path_of(SLOT, "lock"), fcntl.LOCK_EX):
        assert gate.state(SLOT) is GateState.BLOCKED
        error = refusal(gate, by_drain=by_drain)
        assert isinstance(error, UnitBlockedError)
        assert why_not_passed(GPU, error).code is ReasonCode.WRITE_BLOCKED


@pytest.mark.usefixtures("worker")
async def test_the_agent_waits_for_an_allocation_and_tries_the_change_again(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel, gate = simulated("2xA10"), Gate(tmp_path / "locks")
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        with locked(gate.path_of(SLOT, "lock"), fcntl.LOCK_SH):
            before = gate.path_of(SLOT, "json").read_bytes()
            for _ in range(12):
                await node.report_account()
                await node.advance(1)
            assert kernel.pci.functions[GPU].driver == "vfio-pci"
            assert [note.code for note in node.view.problems if note.subject == GPU] == [ReasonCode.UNIT_BUSY]
            assert gate.path_of(SLOT, "json").read_bytes() == before, "nothing is written"
        for _ in range(30):
            await node.report_account()
            await node.advance(1)
        assert (kernel.pci.functions[GPU].driver, gate.state(SLOT)) == ("nvidia", GateState.OPEN)
        assert [note for note in node.view.problems if note.subject == GPU] == []


class Clock:
    """The clock of waits, which goes on while nobody looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(gatelock, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(gatelock, "sleep", self.pass_time)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_process_that_was_stopped_after_a_look_looks_once_more(clock: Clock, stopped_after: int) -> None:
    looks_at = list[float]()
    for _ in tries(10.0, 0.5):
        looks_at.append(clock.now_s)
        if len(looks_at) == stopped_after:
            clock.pass_time(12.0)
    assert len(looks_at) == stopped_after + 1
    assert looks_at[-1] >= 110.0, "the last look is not before the deadline"


def test_a_wait_ends_with_the_first_look_after_its_deadline(clock: Clock) -> None:
    assert [clock.now_s for _ in tries(1.0, 0.5)] == [100.0, 100.5, 101.0]
    assert [clock.now_s for _ in tries(0.0, 0.5)] == [101.0], "no patience: one look, and no pause"
    assert clock.now_s == 101.0


def test_a_command_that_was_stopped_takes_the_answer_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    gate, request, real, readings = Gate(tmp_path), DrainRequest(UnitId("x"), (SLOT,), "unbind it", {}), Gate.read, 0

    def read(self: Gate, slot: str) -> object:
        nonlocal readings
        found, readings = real(self, slot), readings + 1
        if readings == 2:  # the command is stopped here, until long after the agent has answered
            monkeypatch.setattr(Gate, "read", real)
            Gate(tmp_path).answer(SLOT, 1, None)
            clock.pass_time(ANSWER_S + 2.0)
        return found

    with draining(gate, request):
        monkeypatch.setattr(Gate, "read", read)
        assert _answer(gate, request) is None


class Contended:
    """A file that another process has locked; that process ends while the waiting one is stopped after a look."""

    def __init__(self, other: int, ends_after: int | None, clock: Clock) -> None:
        self.looks, self._other, self._ends_after, self._clock, self._flock = 0, other, ends_after, clock, fcntl.flock

    def flock(self, fd: int, operation: int) -> None:
        """Lock the file; raise BlockingIOError."""
        self.looks += 1
        try:
            self._flock(fd, operation)
        except BlockingIOError:
            if self.looks == self._ends_after:
                self._flock(self._other, fcntl.LOCK_UN)
                self._clock.pass_time(5.0)
            raise


@pytest.mark.parametrize(
    ("patience_s", "ends_after", "taken", "looks"),
    [(0.2, 1, True, 2), (0.2, 2, True, 3), (0.0, 1, False, 1), (0.003, None, False, 3)],
    ids=["stopped at first", "stopped later", "no patience", "never free"],
)
def test_a_lock_that_was_released_while_the_process_was_stopped_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    patience_s: float,
    ends_after: int | None,
    taken: bool,
    looks: int,
) -> None:
    path = tmp_path / "lock"
    with locked(path, fcntl.LOCK_EX) as other, gatelock.opened(path) as fd:
        contended = Contended(other, ends_after, clock)
        monkeypatch.setattr(fcntl, "flock", contended.flock)
        assert (try_lock(fd, fcntl.LOCK_EX, patience_s), contended.looks) == (taken, looks)

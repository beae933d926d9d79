"""The files of gates are deleted while processes have them open: no two changes at once, and no lost allocation."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic  # noqa: TID251  the lines of allocations carry it

import pytest

from gpuvirt.agent.change.gate.gate import Gate, Gates
from gpuvirt.agent.change.gate.gatelock import Anchor, GateFailedError, UnitBusyError, UnitUnsettledError
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.model.allocation.ledger import SettledAt
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.steps import RollBack, Step, Unbind
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in
from tests.sim.simulated import Simulated

GPU = PciAddress("0000:65:00.0")
SLOT, OTHER = slot_of(GPU), "0000:ca:00"

CHANGER = """
import os, subprocess, sys
from pathlib import Path
from gpuvirt.agent.change.gate.gatelock import Anchor
from gpuvirt.agent.change.gate.gate import Gates, gate_at
folder, slot = Path(sys.argv[1]), sys.argv[2]
gates = Gates(gate_at(folder / "locks"), folder / "no kubelet", Anchor(folder / "null"))
with gates.change("unit", lambda: (slot,)) as passed:
    if "child" in sys.argv:
        subprocess.Popen(["/bin/cat"], stdin=sys.stdin, stdout=subprocess.DEVNULL, pass_fds=passed.locks)
    print("changes", flush=True)
    os.read(int(os.environ["HOLD"]), 1)
"""


def gates_in(folder: Path) -> Gates:
    return Gates(Gate(folder / "locks"), folder / "no kubelet", Anchor(folder / "null"))


@contextmanager
def changing(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run another process that changes the first slot."""
    hold, release = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CHANGER, str(folder), SLOT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[hold],
        env={"HOLD": str(hold)},
    )
    os.close(hold)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "changes\n"
        yield process
    finally:
        os.close(release)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed-with-a-child"])
def test_a_deleted_folder_lets_no_second_change_in(tmp_path: Path, *, killed: bool) -> None:
    gates = gates_in(tmp_path)
    with changing(tmp_path, *["child"] * killed) as process:
        if killed:
            process.kill()
            process.wait()
        shutil.rmtree(tmp_path / "locks")
        with pytest.raises(UnitBusyError, match="its gate's files were deleted"), gates.change("x", lambda: (SLOT,)):
            pass
        with gates.change("y", lambda: (OTHER,)):
            pass
    until_it_passes(gates)


def until_it_passes(gates: Gates) -> None:
    """Change the slot as soon as the child of the killed process has ended, too."""
    while True:
        try:
            with gates.change("x", lambda: (SLOT,)):
                return
        except UnitBusyError:
            continue


@pytest.mark.parametrize("null", [Path("/dev/null"), None], ids=["/dev/null", "a file"])
def test_two_open_files_never_lock_the_same_slot(tmp_path: Path, null: Path | None) -> None:
    anchor, slots = (
        Anchor(null or tmp_path / "null"),
        (f"ffff:fe:{os.getpid() % 32:02x}", f"fffe:fe:{os.getpid() % 32:02x}"),
    )
    with ExitStack() as first:
        anchor.lock(first, "x", slots)
        for slot in slots:
            with ExitStack() as second, pytest.raises(UnitBusyError, match=slot):
                anchor.lock(second, "y", (slot,))
        with ExitStack() as second:
            anchor.lock(second, "y", ("fffd:fe:1f",))
    with ExitStack() as second:
        anchor.lock(second, "y", slots)


def test_a_change_stops_before_the_next_step_when_its_files_are_deleted(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    taken = list[Step | RollBack]()

    def report(step: Step | RollBack) -> None:
        taken.append(step)
        if len(taken) == 1:
            shutil.rmtree(change_host.locks)

    (reason,) = change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}, NOBODY, report)
    assert (reason.code, "ESTALE" in reason.text) == (ReasonCode.GATE_FAILED, True)
    assert kernel.pci.functions[GPU].driver == "vfio-pci"
    assert isinstance(taken[1], RollBack)
    assert change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}) == ()


def test_a_change_whose_files_are_deleted_returns_what_it_has_taken(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    rolled_back = list[str | None]()

    def report(step: Step | RollBack) -> None:
        if isinstance(step, Unbind):
            shutil.rmtree(change_host.locks)
        if isinstance(step, RollBack):
            rolled_back.append(kernel.pci.functions[GPU].driver)

    reasons = change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}, NOBODY, report)
    assert [reason.code for reason in reasons] == [ReasonCode.GATE_FAILED]
    assert rolled_back == [None]
    assert kernel.pci.functions[GPU].driver == "vfio-pci"


class Deletes:
    """Deletes the file of each lock between its open and its lock, a number of times."""

    def __init__(self, times: int, *kinds: str) -> None:
        self._left = times
        self._kinds = kinds or (".lock",)
        self._flock = fcntl.flock

    def flock(self, fd: int, operation: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  a descriptor's
        if self._left and path.suffix in self._kinds:
            self._left -= 1
            path.unlink()
        self._flock(fd, operation)


def test_the_line_of_an_allocation_is_in_the_present_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocate has opened the file before it is deleted: a change by another process must find the allocation."""
    gate = Gate(tmp_path)
    with gate.allocation({SLOT: ["earlier"]}):
        pass
    monkeypatch.setattr(fcntl, "flock", Deletes(1).flock)
    with gate.allocation({SLOT: ["one"]}):
        pass
    assert gate.path_of(SLOT, "lock").read_text().endswith(" one\n")
    gate.path_of(SLOT, "lock").write_text(gate.path_of(SLOT, "lock").read_text().replace(f" {os.getpid()} ", " 1 "))
    with pytest.raises(UnitUnsettledError, match="one was allocated"), Gate(tmp_path).change("x", lambda: (SLOT,)):
        pass


def test_the_lines_of_a_slot_are_kept_until_the_present_file_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path)
    with gate.allocation({SLOT: ["one"]}):
        pass
    monkeypatch.setattr(fcntl, "flock", Deletes(1).flock)
    for kept in ({SLOT}, set()):
        gate.keep_lines(SettledAt(monotonic() + 1))
        assert gate.lines.kept.keys() == kept


def test_a_change_locks_the_present_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Deletes(2, ".lock", ".owner").flock)
    gate, other = Gate(tmp_path), Gate(tmp_path)
    with gate.change("x", lambda: (SLOT,)), pytest.raises(UnitBusyError), other.change("x", lambda: (SLOT,)):
        pass


def test_a_file_that_is_deleted_again_and_again_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Deletes(100).flock)
    with pytest.raises(GateFailedError, match="ESTALE"), Gate(tmp_path).change("x", lambda: (SLOT,)):
        pass
    with pytest.raises(GateFailedError, match="ESTALE"):
        Gate(tmp_path).allocation({SLOT: ["one"]})

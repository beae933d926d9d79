"""The gates of a host: the record of each gate, and which of several processes may change the functions behind it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic  # noqa: TID251  the age of damage is noted by it

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.change.gate import gatefiles as unsettledslots
from gpuvirt.agent.change.gate.gate import Gate, UnitBlockedError, UnitBusyError, UnitUnsettledError, boot_id
from gpuvirt.agent.change.gate.gatefiles import MOST_BYTES
from gpuvirt.agent.change.gate.gaterecord import (
    NEXT,
    AccountReading,
    Damaged,
    GateOwner,
    GateRecord,
    GateState,
    IllegalMoveError,
    allocation,
    decode,
    encode,
    lines_of,
    newest,
    settled,
    state_of,
    unsettled,
)
from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId
from gpuvirt.facts.pci import PciFunction
from gpuvirt.model.allocation.ledger import SettledAt
from gpuvirt.model.inventory.isolation import Slots, slots_of
from gpuvirt.model.reasons import Reason, ReasonCode

BOOT, SLOT, OTHER = "boot", "0000:65:00", "0000:ca:00"
OWNER, OTHERS = GateOwner(7, 4711), GateOwner(8, 4711)

RECORDS = st.builds(
    GateRecord,
    boot_id=st.just(BOOT),
    generation=st.integers(0, 1 << 40),
    state=st.sampled_from(GateState),
    owner=st.none() | st.just(OWNER),
    intent=st.none() | st.text(max_size=40),
    reason=st.none() | st.builds(Reason, st.sampled_from(ReasonCode), st.text(max_size=9), st.text(max_size=9)),
)


@given(RECORDS, st.sampled_from(GateState))
def test_a_record_moves_only_to_the_states_that_may_follow(record: GateRecord, state: GateState) -> None:
    if state in NEXT[record.state]:
        assert record.move(state).state is state
    else:
        with pytest.raises(IllegalMoveError, match=f"from {record.state} to"):
            record.move(state)


@given(RECORDS)
def test_a_change_begins_in_an_open_gate_alone(record: GateRecord) -> None:
    """A change settles the record of an earlier change first."""
    begun = settled(record, BOOT).begin(OWNER)
    assert (begun.state, begun.owner, begun.generation) == (GateState.APPLYING, OWNER, record.generation + 1)
    for kind in (record, begun):
        if GateState.APPLYING not in NEXT[kind.state]:
            with pytest.raises(IllegalMoveError):
                kind.begin(OWNER)


@given(RECORDS)
def test_a_record_on_disk_is_valid_until_the_next_boot(record: GateRecord) -> None:
    assert decode(encode(record), BOOT) == record
    assert decode(encode(record), "another boot") == GateRecord("another boot")
    assert decode(None, BOOT) == GateRecord(BOOT)


@given(RECORDS, st.data())
def test_a_gate_with_a_damaged_record_is_settling_and_never_open(record: GateRecord, data: st.DataObject) -> None:
    content = encode(record)
    torn = content[: data.draw(st.integers(0, len(content) - 1))]
    found = decode(torn, BOOT)
    assert isinstance(found, Damaged)
    assert state_of(found, is_locked=False, has_owner=False) is GateState.SETTLING


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"boot_id": 1}', b'"x"', b"\xff", b"null", encode(GateRecord(BOOT))[:-1]]
)
def test_content_that_is_no_record_is_damaged(content: bytes) -> None:
    assert isinstance(decode(content, BOOT), Damaged)


@given(RECORDS, st.booleans(), st.booleans())
def test_locks_take_precedence_over_the_record_for_the_state_of_a_gate(
    record: GateRecord, is_locked: bool, has_owner: bool
) -> None:
    state = state_of(record, is_locked=is_locked, has_owner=has_owner)
    if is_locked and not has_owner:
        assert state is GateState.BLOCKED
    elif not is_locked and has_owner and record.state is GateState.DRAINING:
        assert state is GateState.DRAINING, (
            "a draining process doesn't hold the lock, so that allocations get a refusal"
        )
    elif not is_locked and record.state not in {GateState.OPEN, GateState.HELD}:
        assert state is GateState.SETTLING, "the process of a change without a lock has ended"
    else:
        assert state is record.state


def one_slot() -> Slots:
    return (SLOT,)


CHANGER = """
import os, subprocess, sys
from pathlib import Path
from gpuvirt.agent.change.gate.gate import gate_at
folder, child, *slots = sys.argv[1:]
with gate_at(Path(folder)).change("unit", lambda: tuple(slots)) as passed:
    passed.note("unbind it")
    if child == "child":
        subprocess.Popen(["/bin/cat"], stdin=sys.stdin, stdout=subprocess.DEVNULL, pass_fds=tuple(passed.locks))
    print("has it", flush=True)
    os.read(int(os.environ["HOLD"]), 1)
"""


@contextmanager
def changing(folder: Path, *slots: str, child: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """Run another process that holds the gates; its child, if any, holds the locks until the child's input ends."""
    hold, release = os.pipe()
    command = [sys.executable, "-c", CHANGER, str(folder), "child" if child else "alone", *slots]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[hold],
        env={"HOLD": str(hold)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        os.close(hold)
        os.close(release)


def test_a_change_excludes_changes_and_allocations_of_other_processes(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with changing(tmp_path, SLOT) as other:
        assert gate.state(SLOT) is GateState.APPLYING
        with (
            pytest.raises(UnitBusyError, match=r"another process.*step: unbind it") as busy,
            gate.change("x", one_slot),
        ):
            pass
        assert not isinstance(busy.value, UnitBlockedError)
        with pytest.raises(UnitBusyError), gate.allocation({SLOT: ["one"]}):
            pass
        with gate.change("other", lambda: (OTHER,)), gate.allocation({OTHER: ["one"]}):
            assert gate.state(OTHER) is GateState.APPLYING
        other.kill()
        other.wait()
        assert gate.state(SLOT) is GateState.SETTLING, "the process of the change has ended"
        with gate.change("x", one_slot):
            assert gate.state(SLOT) is GateState.APPLYING
    assert gate.state(SLOT) is GateState.OPEN


def test_a_gate_stays_blocked_while_a_child_of_a_killed_process_holds_its_lock(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with changing(tmp_path, SLOT, child=True) as other:
        other.kill()
        other.wait()
        assert gate.state(SLOT) is GateState.BLOCKED
        with pytest.raises(UnitBlockedError) as blocked, gate.change("x", one_slot):
            pass
        assert blocked.value.step == "unbind it"
        with pytest.raises(UnitBlockedError), gate.allocation({SLOT: ["one"]}):
            pass
        with gate.change("other", lambda: (OTHER,)):
            pass
        assert other.stdin is not None
        other.stdin.close()  # the child ends
        assert other.stdout is not None
        while gate.state(SLOT) is GateState.BLOCKED:
            pass
        assert gate.state(SLOT) is GateState.SETTLING
        with gate.change("x", one_slot):
            pass
        other.stdin = None


def test_gates_do_not_exclude_changes_and_allocations_of_the_same_process(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with gate.change("x", one_slot), gate.allocation({SLOT: ["one"], OTHER: ["two"]}):
        pass
    with gate.allocation({SLOT: ["one"]}), gate.allocation({SLOT: ["one"]}):
        pass


ALLOCATOR = """
import sys
from pathlib import Path
from gpuvirt.agent.change.gate.gate import Gate
folder, slot, device = sys.argv[1:]
with Gate(Path(folder)).allocation({slot: [device]}):
    pass
"""


def test_a_change_waits_until_the_kubelet_has_recorded_allocations_of_another_process(tmp_path: Path) -> None:
    gate, lock = Gate(tmp_path), tmp_path / f"{SLOT}.lock"
    subprocess.run([sys.executable, "-c", ALLOCATOR, str(tmp_path), SLOT, "gpu a"], check=True)
    with pytest.raises(UnitUnsettledError, match=r"gpu a was allocated [0-9.]+ s ago"), gate.change("x", one_slot):
        pass
    at, rest = lock.read_text().split(" ", 1)
    lock.write_text(f"{(long_ago_s := float(at) - 3600)} {rest}")
    with gate.allocation({SLOT: ["ours, which our changes know"]}):
        pass

    def lacking(at_s: float, settled_s: float = -inf) -> AccountReading:
        return AccountReading(at_s, frozenset(), SettledAt(settled_s))

    now_s, late_s = float(at), long_ago_s + 1
    once = lacking(now_s, late_s)
    before = AccountReading(long_ago_s - 1, frozenset({"gpu a"}))  # of the pod that had it then
    too_early = [[], [before], [lacking(now_s - 2.0), lacking(now_s)], [lacking(now_s - 9, long_ago_s - 1)] * 2]
    recorded = AccountReading(now_s - 2.0, frozenset({"gpu a"}), SettledAt(late_s))
    for readings in (
        *too_early,
        [once],
        [once, once],
        [lacking(now_s - 9), once],
        [lacking(now_s - 1.9, late_s), once],
        [recorded, once],
    ):
        with (
            pytest.raises(UnitUnsettledError, match="may be admitting") as error,
            gate.change("x", one_slot, partial(list[AccountReading], readings)),
        ):
            pass
        assert error.value.again_soon is (once in readings), "no age settles an allocation"
    for readings in ([lacking(now_s - 2.0, late_s), once], [AccountReading(now_s, frozenset({"gpu a"}))]):
        with gate.change("x", one_slot, partial(list[AccountReading], readings)):
            pass
    lock.write_text("torn")
    for readings in (
        [lacking(now_s - 2.0), lacking(now_s)],
        [lacking(now_s - 2.0, now_s), lacking(now_s, now_s)],
    ):
        with (
            pytest.raises(UnitUnsettledError, match="an unreadable entry"),
            gate.change("x", one_slot, partial(list[AccountReading], readings)),
        ):
            pass
    readings = [lacking(now_s - 2.0, monotonic()), lacking(now_s, monotonic())]
    with gate.change("x", one_slot, partial(list[AccountReading], readings)):
        pass


DEVICES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)


@given(st.dictionaries(DEVICES, st.tuples(st.floats(0, 1e6), st.booleans())), st.floats(0, 1e6))
def test_allocations_of_other_processes_are_unsettled_until_the_accounts_must_show_them(
    entries: dict[str, tuple[float, bool]], settled_s: float
) -> None:
    lines = [allocation(device, OWNER if ours else OTHERS, at_s) for device, (at_s, ours) in entries.items()]
    readings = [AccountReading(now_s, frozenset(), SettledAt(settled_s)) for now_s in (2e6, 2e6 + 2.0)]
    found = {line.device for line in unsettled(lines_of("".join(lines), 0.0), OWNER, readings)}
    assert found >= {device for device, (at_s, ours) in entries.items() if not ours and at_s > settled_s + 0.01}
    assert found <= {device for device, (at_s, ours) in entries.items() if not ours and at_s > settled_s - 0.01}


def test_lines_are_removed_once_they_are_settled_and_added_again_once_they_are_deleted(tmp_path: Path) -> None:
    for slot in (SLOT, OTHER):
        subprocess.run([sys.executable, "-c", ALLOCATOR, str(tmp_path), slot, "earlier"], check=True)
    gate, lock, other = Gate(tmp_path), tmp_path / f"{SLOT}.lock", tmp_path / f"{OTHER}.lock"
    gate.find_lines()
    with gate.allocation({SLOT: ["new"]}):
        gate.keep_lines(SettledAt(monotonic()))  # the slot is locked
    between_s = lines_of(lock.read_text(), 0.0)[-1].at_s
    written = lock.read_text()
    gate.keep_lines(SettledAt(between_s))
    assert lock.read_text() == written
    for delete in (lock.unlink, lambda: lock.write_text("")):
        delete()
        gate.keep_lines(SettledAt(between_s))
        assert [line.device for line in lines_of(lock.read_text(), 0.0)] == ["new"]
    lock.write_text("torn")
    gate.keep_lines(SettledAt(between_s))
    assert [line.device for line in lines_of(lock.read_text(), 0.0)] == ["an unreadable entry", "new"]
    lock.write_text("torn")
    gate.keep_lines(SettledAt(monotonic() + 1), frozenset({"new"}))
    assert [line.device for line in lines_of(lock.read_text(), 0.0)] == ["an unreadable entry", "new"]
    lock.write_text("torn")
    gate.keep_lines(SettledAt(monotonic() + 1))
    assert (lock.read_text(), other.read_text(), dict(gate.lines.kept)) == ("", "", {})


def test_a_long_file_of_allocations_is_shortened(tmp_path: Path) -> None:
    gate, lock = Gate(tmp_path), tmp_path / f"{SLOT}.lock"
    lock.write_text("1.0 2 3 long-ago\n" * 2000)
    with gate.allocation({SLOT: ["new"]}):
        assert [line.split()[-1] for line in lock.read_text().splitlines()] == ["long-ago", "new"]


def test_slots_that_join_a_unit_while_locks_are_taken_are_locked_too(tmp_path: Path) -> None:
    gate, answers = Gate(tmp_path), iter([(SLOT,), (SLOT, OTHER), (SLOT, OTHER), (SLOT, OTHER)])
    with gate.change("x", lambda: next(answers)) as passed:
        assert passed.slots == (SLOT, OTHER)
        assert gate.state(OTHER) is GateState.APPLYING
    restless = iter(range(1000))
    with pytest.raises(UnitBusyError, match="changed 5 times while"), gate.change("x", lambda: (str(next(restless)),)):
        pass


@pytest.mark.parametrize("written_at", [1.0, 1e11])
def test_a_recently_damaged_record_refuses_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_at: float
) -> None:
    """How long ago it was damaged does not follow from its time: the wall clock may have stepped since."""
    gate, path = Gate(tmp_path), tmp_path / f"{SLOT}.json"
    path.write_bytes(b"torn")
    os.utime(path, (written_at, written_at))
    for _ in range(2):
        with pytest.raises(UnitUnsettledError, match="can't be decoded"), gate.change("x", one_slot):
            pass
    assert path.read_bytes() == b"torn"
    note = path.with_name(f"{path.name}{unsettledslots.SUFFIX}")
    identity, _, seen_s = note.read_text().rpartition(" ")
    for other in (f"another {seen_s}", f"{identity} {float(seen_s) + 9e9}"):
        note.write_text(other)
        assert unsettledslots.seen_damaged_s(path) > float(seen_s), "that damage was another one, or of another boot"
        assert unsettledslots.seen_damaged_s(path) <= monotonic()
    monkeypatch.setattr(unsettledslots, "monotonic", lambda: monotonic() + 10.0)
    with gate.change("x", one_slot):
        assert gate.state(SLOT) is GateState.APPLYING
    found = gate.read(SLOT)
    assert isinstance(found, GateRecord)
    assert (found.boot_id, found.generation, found.owner) == (boot_id(), 1, None)


def test_a_record_of_another_boot_is_void(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.write(SLOT, GateRecord("the boot before", 7, GateState.APPLYING, OWNER, "unbind it"))
    assert gate.state(SLOT) is GateState.OPEN
    assert gate.read(SLOT) == GateRecord(boot_id())


def test_a_vf_has_the_slot_of_its_pf() -> None:
    pf, vf, audio = PciAddress("0000:65:00.0"), PciAddress("0000:65:01.4"), PciAddress("0000:65:00.1")
    functions = {
        pf: PciFunction(pf, PciId(0x10DE, 0x2236), 0x030200, iommu_group=IommuGroup(1), virtfns=(vf,)),
        vf: PciFunction(vf, PciId(0x10DE, 0x2236), 0x030200, iommu_group=IommuGroup(2), physfn=pf),
    }
    assert slots_of(functions, [vf, pf, audio]) == (SLOT,)


def test_repeated_allocations_of_a_device_keep_one_line() -> None:
    lines = [allocation(device, OWNER, float(second)) for second in range(9) for device in ("a", "b")]
    assert newest("".join((*lines, "torn"))) == "".join((*lines[-2:], "torn"))


def test_repeated_allocations_leave_a_short_file(tmp_path: Path) -> None:
    """Each change reads the file, and each Allocate would try to shorten a file that can't become shorter."""
    gate = Gate(tmp_path / "gate")
    for number in range(2000):
        with gate.allocation({SLOT: [f"device-{number % 2}"]}):
            pass
    assert (tmp_path / f"gate/{SLOT}.lock").stat().st_size < MOST_BYTES + 200

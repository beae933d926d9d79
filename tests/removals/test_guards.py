"""Each guard is found and removed, and a test notices. The list of unnoticed removals has no outdated line."""

import ast

import pytest

from tests.removals.__main__ import make
from tests.removals.guards import ROOT, TARGETS, Removal, name_of, removals, removals_of, sites
from tests.removals.trial import Trial, remove_in_child
from tests.removals.unnoticed import UNNOTICED

SOURCE = """
class Gate:
    def enter(self, slot: str) -> None:
        if self.closed or not slot:
            raise BusyError(slot)
        self._refuse_damaged(slot)

    def why_not(self, slot: str) -> Reason | None:
        if slot in self.busy and (found := self.read(slot)):
            return busy(slot)
        return self.why_damaged(slot)


def reasons(state: State) -> Iterator[Reason]:
    for slot in state.slots:
        if slot.blocked:
            yield blocked(slot)
    yield from others(state)


def users(kernel: Kernel) -> Users | Unread:
    numbers = read_numbers(kernel)
    if isinstance(numbers, Unread):
        return numbers
    return Users(numbers)


def allocate(offers: Offers) -> Devices:
    found, count = offers.read(), 0
    wait()
    found = offers.read()
    count = count + 1
    return found
"""
GUARDS = """
Gate.enter: self.closed [or in] if self.closed or not slot
Gate.enter: not slot [or in] if self.closed or not slot
Gate.enter: raise BusyError(slot)
Gate.enter: self._refuse_damaged(slot)
Gate.why_not: slot in self.busy [and in] if slot in self.busy and (found := self.read(slot))
Gate.why_not: return busy(slot)
Gate.why_not: return self.why_damaged(slot)
reasons: yield blocked(slot)
reasons: yield from others(state)
users: return numbers
allocate: found = offers.read()
"""
CLOSE_SOURCE = """
NEW_S: Final = 10.0
MISSES_TO_END = 2
TIMEOUT_S = 5.0

def users(kernel: Kernel, owner: Owner) -> tuple[Open, ...] | Unread:
    for pid in kernel.pids:
        if pid == owner.pid:
            continue
        found += [node for node in nodes(pid, TIMEOUT_S) if node.at_s < now_s() - NEW_S if node is not None]
    try:
        with saved(any(entry.misses < MISSES_TO_END for entry in entries if entry.owner)):
            self.store.save(found)
            return read(kernel)
    except OSError as error:
        return () if error.errno in ABSENT else Unread(error)
    except DamagedError as error:
        raise UnknownError from error


async def is_seen(path: HostPath) -> bool:
    try:
        await self._write(path)
    except OSError:
        return False
    return True


def name(path: HostPath) -> str | None:
    try:
        return await read(path)
    except OSError as error:
        return None
    except ValueError as error:
        return str(error)
"""
CLOSE_GUARDS = """
users: continue [in] if pid == owner.pid
users: if node.at_s < now_s() - NEW_S [in] for node in nodes(pid, TIMEOUT_S)
users: if node is not None [in] for node in nodes(pid, TIMEOUT_S)
users: if entry.owner [in] for entry in entries
users: self.store.save(found)
users: return read(kernel)
users: return () if error.errno in ABSENT else Unread(error)
users: return () if error.errno in ABSENT else Unread(error) [as return ()]
users: raise UnknownError from error
users: raise UnknownError from error [as return ()]
is_seen: await self._write(path)
is_seen: return False [as return True]
name: return str(error) [as return None]
<module>: NEW_S = 10.0 [times 0]
<module>: NEW_S = 10.0 [times 1000]
<module>: MISSES_TO_END = 2 [times 0]
<module>: MISSES_TO_END = 2 [times 1000]
"""
NOTICED = "model.change.driverplanning: _why_not_to_native: yield from _why_no_native_driver(state, function)"
TEST = "tests/agent/binding/test_plans.py::test_a_gpu_whose_vf_a_vm_has_gets_no_native_driver"
VSPHERE = "tests/hypervisors/test_vsphere.py"
IN_CHILD = "gpuvirt_schedules.hypervisors.vsphere.backend: _begun: task = vm.PowerOnVM_Task(None)"
IN_CHILD_TEST = f"{VSPHERE}::test_the_day_becomes_night"
BURNING = "tests/removals/burning.py"
ENDLESS = f"{BURNING}::test_without_end_unless_a_step_is_refused"
ABSOLUTE = "tests/agent/change/test_proofs.py::test_the_age_of_a_proof_counts_from_the_begin_of_its_walk"
OTHER_TEST = "tests/agent/binding/test_plans.py::test_a_missing_vfio_module_is_loaded"


BOTH = pytest.mark.parametrize(
    ("module", "source", "guards"), [("gate", SOURCE, GUARDS), ("agent.kubelet.gate", CLOSE_SOURCE, CLOSE_GUARDS)]
)


@BOTH
def test_each_guard_is_found(module: str, source: str, guards: str) -> None:
    found = [each.key.removeprefix(f"{module}: ") for each in removals_of(f"gpuvirt.{module}", source)]
    assert found == guards.split("\n")[1:-1]


@BOTH
def test_the_rest_of_the_code_stays_when_a_guard_is_removed(module: str, source: str, guards: str) -> None:
    """The lines keep their numbers, and a generator stays one."""
    lines = ast.unparse(ast.parse(source)).splitlines()
    for number, guard in enumerate(guards.split("\n")[1:-1]):
        tree = ast.parse(source)
        sites(tree, closely=module != "gate")[number].remove()
        changed = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
        assert len(changed) == len(lines)
        assert sum(before != after for before, after in zip(lines, changed, strict=True)) == 1, guard


def test_each_target_has_guards() -> None:
    found = {removal.module for removal in removals().values()}
    for target in TARGETS:
        assert any(f"{module}.".startswith(f"{name_of(target)}.") for module in found), target


def test_no_line_about_an_unnoticed_removal_is_outdated() -> None:
    assert UNNOTICED.keys() <= removals().keys()
    assert all(len(reason) > 20 for reason in UNNOTICED.values())


@pytest.mark.timeout(300)
def test_a_removed_guard_is_noticed_by_its_test_alone() -> None:
    trials = [Trial(NOTICED, (OTHER_TEST, TEST)), Trial(NOTICED, (OTHER_TEST,)), Trial(NOTICED, (TEST,))]
    before = (ROOT / "model/change/driverplanning.py").read_bytes()
    assert [make([trial])[NOTICED] for trial in trials] == [TEST, "", TEST]
    assert (ROOT / "model/change/driverplanning.py").read_bytes() == before


@pytest.mark.ring("vsphere")
def test_a_guard_is_removed_in_the_child_of_a_connection() -> None:
    other = f"{VSPHERE}::test_all_vms_are_read"
    trials = [Trial(IN_CHILD, (other, IN_CHILD_TEST)), Trial(IN_CHILD, (other,))]
    assert [make([trial])[IN_CHILD] for trial in trials] == [IN_CHILD_TEST, ""]


def test_a_guard_that_can_not_be_removed_in_a_child_is_no_trial() -> None:
    """Each test of the child would notice a child that does not start."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        remove_in_child(
            Removal(
                "gpuvirt_schedules.hypervisors.child: opened: no guard", "gpuvirt_schedules.hypervisors.child", 0, 1
            )
        )


@pytest.mark.timeout(300)
def test_another_limit_is_noticed_by_a_test_that_knows_the_right_one() -> None:
    limit = "hardware.access.proof: <module>: WITHIN_S = 5.0 [times 1000]"
    assert make([Trial(limit, (OTHER_TEST, ABSOLUTE))]) == {limit: ABSOLUTE}


@pytest.mark.timeout(300)
def test_only_a_test_that_does_not_end_without_the_guard_notices_by_its_time() -> None:
    """Neither several slow tests together nor a test that is too slow in any case prove anything."""
    refusal = next(key for key in removals() if "GateRecord._noted: raise" in key)
    slow = (f"{BURNING}::test_four_seconds", *(f"{BURNING}::test_a_second[{number}]" for number in range(4)))
    trials = [Trial(NOTICED, (*slow, OTHER_TEST)), Trial(refusal, (*slow, ENDLESS))]
    assert make(trials, most_cpu_s=2) == {NOTICED: "", refusal: ENDLESS}

"""A gate whose files can't be opened, locked or written: nothing is allocated and no step of a change is taken."""

import errno
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate.gate import Gate, GateFailedError
from gpuvirt.agent.change.gate.gaterecord import GateState
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in
from tests.agent.node.diskfaults import OF_A_DISK, OF_A_PROCESS, Faults, failing
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

GPU, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
SLOT = slot_of(GPU)
A10 = "nvidia.com/GA102GL_A10"
FAULTS = [*OF_A_PROCESS, *OF_A_DISK, errno.ENOLCK]

faults = pytest.mark.parametrize("number", FAULTS, ids=lambda number: errno.errorcode[number])


def refusal(node: SimNode) -> Reason:
    with pytest.raises(AllocationRefusedError) as refused:
        node.allocate(A10, [GPU])
    return refused.value.reason


@faults
async def test_nothing_is_allocated_through_a_gate_that_fails(
    simulated: Simulated, tmp_path: Path, number: int
) -> None:
    """EMFILE is the error of this process alone: a command could lock the gate, and would find no allocation."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        await node.advance(3)
        with failing(tmp_path / "locks", number):
            reason = refusal(node)
            assert reason.code is ReasonCode.GATE_FAILED
            (seen,) = reason.places
            assert errno.errorcode[number] in seen.value
            assert seen.path.startswith(str(tmp_path / "locks" / SLOT))
        node.allocate(A10, [GPU])


async def test_a_line_that_does_not_fit_on_the_disk_refuses(simulated: Simulated, tmp_path: Path) -> None:
    """The file exists and can be opened and locked; a later change may find room, but not the allocation."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        await node.advance(3)
        node.allocate(A10, [SECOND])
        (tmp_path / "locks" / f"{SLOT}.lock").touch()
        with failing(tmp_path / "locks", errno.ENOSPC):
            assert refusal(node).code is ReasonCode.GATE_FAILED
        node.allocate(A10, [GPU])


@faults
def test_no_change_begins_through_a_gate_that_fails(simulated: Simulated, tmp_path: Path, number: int) -> None:
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    with failing(change_host.locks, number), pytest.raises(GateFailedError, match=errno.errorcode[number]):
        change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE})
    assert kernel.writes == []
    assert change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}) == ()
    assert Gate(change_host.locks).state(SLOT) is GateState.OPEN


@pytest.mark.parametrize("number", OF_A_DISK, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("journal_too", [False, True], ids=["gate", "gate-and-journal"])
@pytest.mark.parametrize("after", range(3))
def test_a_change_whose_gate_fails_between_two_steps_is_rolled_back(
    simulated: Simulated, tmp_path: Path, number: int, after: int, journal_too: bool
) -> None:
    """The gate's record can't be written any more: the change takes no further step, and returns what it has touched.

    Afterwards the record says that the change did not end, so that nothing is allocated until the host was observed.
    """
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    before, taken = kernel.pci.functions[GPU].driver, list[Step | RollBack]()

    with failing(tmp_path if journal_too else change_host.locks, number) as disk:
        disk.only = "nothing yet"

        def report(step: Step | RollBack) -> None:
            taken.append(step)
            disk.only = ".json" if len(taken) > after else disk.only

        reasons = change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}, NOBODY, report)
    gate = Gate(change_host.locks)
    if after >= 2 and journal_too:
        assert [reason.code for reason in reasons] == [ReasonCode.STEP_FAILED], "done, but not recorded as done"
        assert kernel.pci.functions[GPU].driver == "nvidia"
        assert change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}) == ()
        return
    assert bool(reasons) == (after < 2), "after the last step nothing is to be refused any more"
    if reasons:
        assert reasons[0].code is ReasonCode.GATE_FAILED
        assert kernel.pci.functions[GPU].driver == before
        assert any(isinstance(step, RollBack) for step in taken)
    else:
        assert kernel.pci.functions[GPU].driver == "nvidia"
        assert len(taken) <= after + 1
    assert gate.state(SLOT) in {GateState.SETTLING, GateState.OPEN}
    gate.settle(SLOT)
    assert gate.state(SLOT) is GateState.OPEN


async def test_an_agent_whose_gates_fail_goes_on_and_reports_why_no_change_begins(
    simulated: Simulated, tmp_path: Path, worker: None
) -> None:
    del worker
    kernel = simulated("2xA10")

    def is_reported(disk: Faults, node: SimNode) -> bool:
        name = errno.errorcode[disk.number]
        return any(note.code is ReasonCode.GATE_FAILED and name in note.text for note in node.view.problems)

    with failing(tmp_path / "locks", errno.EMFILE) as disk:
        async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.CONTAINER)) as node:
            for _ in range(4):
                await node.report_account()
                await node.advance(5)
            assert is_reported(disk, node)
            assert kernel.writes == []
            disk.only = "nothing more"
            for _ in range(30):
                await node.report_account()
                await node.advance(5)
            assert not is_reported(disk, node)
            assert kernel.pci.functions[GPU].driver == "nvidia"

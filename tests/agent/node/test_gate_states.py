"""The states of a gate on disk during a change, and as another process reads them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate import gatepass
from gpuvirt.agent.change.gate.gate import Gate, UnitBusyError, gate_at
from gpuvirt.agent.change.gate.gaterecord import ALLOCATABLE, GateRecord, GateState
from gpuvirt.agent.change.steps.changes import Change, Changes, StalePlanError
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.plan import StepScope
from gpuvirt.model.change.state import DriverJournal, StartedChange
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, inputs
from tests.agent.node.gateholders import GPU, SLOT, draining
from tests.agent.node.pacedworker import OPERATION_S
from tests.agent.node.simnode import SimNode, Workers, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
PASSTHROUGH, CONTAINER = Settings(mode=DesiredMode.PASSTHROUGH), Settings(mode=DesiredMode.CONTAINER)


def record_of(gate: Gate, slot: str = SLOT) -> GateRecord:
    found = gate.read(slot)
    assert isinstance(found, GateRecord)
    return found


def test_a_gpu_that_another_process_drains_is_not_allocated(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with draining(tmp_path) as other:
        record = record_of(gate)
        assert (gate.state(SLOT), record.generation, record.intent) == (GateState.DRAINING, 1, "unbind it")
        for _ in range(2):
            with pytest.raises(UnitBusyError, match=r"waits to change these functions.*unbind it"):
                gate.allocation({SLOT: ["one"]}).__enter__()
        with pytest.raises(UnitBusyError, match="waits to change"), gate.change("x", lambda: (SLOT,)):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert gate.state(SLOT) is GateState.SETTLING
        with pytest.raises(UnitBusyError, match="a change was killed"):
            gate.allocation({SLOT: ["one"]}).__enter__()
    gate.settle(SLOT)
    assert gate.state(SLOT) is GateState.OPEN
    with gate.allocation({SLOT: ["one"]}):
        pass


def test_a_drain_ends_with_its_change_or_without_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    for _ in range(2):
        gate.drain("x", (SLOT,), "unbind it")
    with gate.allocation({SLOT: ["ours: the process knows which devices it drains"]}):
        assert gate.state(SLOT) is GateState.DRAINING
    with gate.change("x", lambda: (SLOT,)):
        assert (gate.state(SLOT), record_of(gate).generation) == (GateState.APPLYING, 1)
    assert gate.state(SLOT) is GateState.OPEN
    gate.drain("x", (SLOT,), "unbind it")
    gate.stop_draining((SLOT,))
    assert (gate.state(SLOT), gate.draining) == (GateState.OPEN, {})


def test_a_drain_ends_when_its_change_cannot_begin(tmp_path: Path) -> None:
    gate, second = Gate(tmp_path), "0000:66:00"
    gate.drain("x", (SLOT,), "unbind it")
    with draining(tmp_path, second), pytest.raises(UnitBusyError), gate.change("x", lambda: (SLOT, second)):
        pass
    assert gate.state(SLOT) is GateState.OPEN


def test_a_change_passes_through_its_states(simulated: Simulated, tmp_path: Path) -> None:
    """Between two steps the gate is safe and the change reads the allocations; each step is recorded before it runs."""
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    gate, seen = Gate(change_host.locks), list[str]()

    def ask(_: Inventory) -> PodAllocations:
        seen.append(gate.state(SLOT))
        return PodAllocations()

    def report(step: Step | RollBack) -> None:
        seen.append(f"{gate.state(SLOT)}: {record_of(gate).intent == step.text}")

    driver = {GPU: DesiredDriver.NATIVE}
    assert change_drivers(change_host, UnitId(GPU), driver, inputs(ask=ask), report) == ()
    assert seen[0] is GateState.APPLYING, "the first reading of the allocations"
    steps = [index for index, state in enumerate(seen) if state == "Applying: True"]
    assert len(steps) >= 2
    assert {seen[index - 1] for index in steps} == {GateState.SAFE}
    assert gate.state(SLOT) is GateState.OPEN


def test_the_gate_is_settling_during_a_rollback(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    gate, seen, taken = Gate(change_host.locks), list[tuple[bool, GateState]](), list[Step | RollBack]()
    change = Change(Changes(lambda: ()), GPU, lambda: len(taken) < 2, None, "what it depends on")

    def report(step: Step | RollBack) -> None:
        taken.append(step)
        back = any(isinstance(step, RollBack) for step in taken[:-1])
        seen.append((back, gate.state(SLOT)))

    (reason,) = change_drivers(change_host, UnitId(GPU), {GPU: DesiredDriver.NATIVE}, NOBODY, report, change)
    assert reason.code is ReasonCode.PLAN_OUTDATED
    assert {state for back, state in seen if back} == {GateState.SETTLING}
    record = record_of(gate)
    assert (gate.state(SLOT), record.reason, record.held_on) == (GateState.HELD, reason, "what it depends on")
    with gate.allocation({SLOT: ["what is offered may be given"]}):
        pass
    gate.release((SLOT,))
    assert gate.state(SLOT) is GateState.OPEN


def test_a_gate_is_blocked_until_a_step_that_timed_out_returns(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    change = Change(Changes(lambda: ()), GPU, lambda: True, None)
    with gate.change("x", lambda: (SLOT,)) as passed, change.under_way(passed):
        with change.step(StepScope.of([PciAddress(GPU)]), "unbind it"):
            change.expire()
            assert (gate.state(SLOT), gate.step_of(SLOT)) == (GateState.BLOCKED, "unbind it")
            with pytest.raises(UnitBusyError):
                gate.allocation({SLOT: ["one"]}).__enter__()
        assert gate.state(SLOT) is GateState.SETTLING
        with pytest.raises(StalePlanError), change.step(StepScope.of([PciAddress(GPU)]), "probe it"):
            pass
    assert gate.state(SLOT) is GateState.OPEN


async def pass_seconds(node: SimNode, seconds: int) -> None:
    for _ in range(seconds):
        await node.report_account()
        await node.advance(1)


@pytest.mark.usefixtures("worker")
async def test_the_gate_drains_while_the_agent_waits_for_the_kubelet(simulated: Simulated, tmp_path: Path) -> None:
    kernel, gate = simulated("2xA10"), Gate(tmp_path / "locks")
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        node.count(A10, GPU)
        await pass_seconds(node, 12)
        assert gate.state(SLOT) is GateState.DRAINING
        assert record_of(gate).intent == f"return {GPU} to its native driver"
        node.counted = frozenset()
        await pass_seconds(node, 12)
        assert (kernel.pci.functions[GPU].driver, gate.state(SLOT)) == ("nvidia", GateState.OPEN)


@pytest.mark.usefixtures("worker")
async def test_an_agent_settles_the_gate_of_a_killed_process_before_it_offers_the_gpu(
    simulated: Simulated, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "locks")
    with draining(gate.folder):
        pass
    assert gate.state(SLOT) is GateState.SETTLING
    async with running_node(simulated("2xA10"), tmp_path, PASSTHROUGH) as node:
        await pass_seconds(node, 2)
        assert gate.state(SLOT) is GateState.OPEN
        node.allocate(A10, [GPU])


@pytest.mark.usefixtures("worker")
async def test_the_agent_settles_the_gate_of_a_killed_command(simulated: Simulated, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path, PASSTHROUGH) as node:
        await pass_seconds(node, 2)
        with draining(gate.folder):
            await pass_seconds(node, 3)
            assert node.refused(A10, [GPU]) is ReasonCode.UNIT_BUSY
        await pass_seconds(node, 4)
        assert gate.state(SLOT) is GateState.OPEN
        node.allocate(A10, [GPU])


async def test_the_gate_of_a_killed_change_opens_only_after_the_reconciler_has_finished_it(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver journal has the started change: until its steps are completed or undone, the GPU is not allocated."""
    monkeypatch.setattr(Workers, "paced", True)
    kernel, gate, journal = simulated("2xA10"), Gate(tmp_path / "locks"), tmp_path / "drivers.json"
    started = DriverJournal(changes={GPU: StartedChange(to_vfio=False, driver="vfio-pci")})
    hostfiles.journal(journal).update(lambda _: replace(started, boot_id=scan(kernel).platform.boot_id))
    with draining(gate.folder):
        pass
    async with running_node(kernel, tmp_path) as node:
        unfinished = 0
        while hostfiles.journal(journal).value.changes:
            unfinished += 1
            assert gate.state(SLOT) not in ALLOCATABLE
            assert node.refused(A10, [GPU]) in {ReasonCode.UNIT_BUSY, ReasonCode.UNKNOWN_DEVICE}
            await node.report_account()
            await node.advance(OPERATION_S)
        assert unfinished > 1, "the agent runs while the change is unfinished"
        await pass_seconds(node, 3)
        assert gate.state(SLOT) is GateState.OPEN
        node.allocate(A10, [GPU])


@pytest.mark.usefixtures("worker")
async def test_a_failed_change_stays_held_after_a_restart(simulated: Simulated, tmp_path: Path) -> None:
    """The next agent does not repeat a change that failed under the same circumstances, and reports the reason."""
    kernel, gate = simulated("2xA10"), Gate(tmp_path / "locks")
    kernel.start_vm(IommuGroup(12))
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await pass_seconds(node, 12)
        assert gate.state(SLOT) is GateState.HELD
        before = record_of(gate)
        assert before.reason is not None
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await pass_seconds(node, 3)
        assert before.reason.code in {note.code for note in node.view.problems}
        assert record_of(gate) == before, "the agent has not tried the change"
        await pass_seconds(node, 30)
        assert record_of(gate).generation > before.generation
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await pass_seconds(node, 12)
        assert gate.state(SLOT) is GateState.OPEN, "the change is no longer desired"


MODULE_LOADER = """
import sys
from pathlib import Path
from gpuvirt.agent.change.gate.gate import gate_at
with gate_at(Path(sys.argv[1])).change("other", lambda: ("0000:66:00",)) as passed, passed.modules():
    print("loads", flush=True)
    sys.stdin.read()
"""


def test_one_process_changes_kernel_modules_at_a_time(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of two units run in parallel, except for the steps that load or unload a kernel module."""
    kernel = simulated("2xA10")
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    monkeypatch.setattr(gatepass, "MODULES_S", 0.1)
    gate = gate_at(change_host.locks)
    with subprocess.Popen(
        [sys.executable, "-c", MODULE_LOADER, str(change_host.locks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "loads\n"
        with gate.change("x", lambda: (SLOT,)) as passed:
            with pytest.raises(UnitBusyError, match="is changing kernel modules"), passed.modules():
                pass
            passed.note("unbind it")
        other.communicate()
    with gate.change("x", lambda: (SLOT,)) as passed, passed.modules():
        pass
    with gate.modules():
        assert set(gate.states()) == {SLOT, "0000:66:00"}

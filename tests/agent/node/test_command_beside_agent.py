"""A command beside a running agent: the agent drains the devices before the command changes them, or refuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate import drainrequest
from gpuvirt.agent.change.gate.agentlock import no_agent, only_agent
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, beside_agents
from gpuvirt.agent.change.gate.gate import Gate, Gates, gate_at
from gpuvirt.agent.change.gate.gatelock import Anchor
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.errors import AlreadyRunningError
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

GPU, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
SLOT = slot_of(GPU)
A10 = "nvidia.com/GA102GL_A10"

COMMAND = """
import json, sys
from pathlib import Path
from gpuvirt.agent.change.gate.drainrequest import DrainRequest, _answer, draining
from gpuvirt.agent.change.gate.gate import gate_at
folder, gpu, slot, *desires = sys.argv[1:]
gate = gate_at(Path(folder))
request = DrainRequest(gpu, (slot,), f"unbind {gpu}", {gpu: desires})
print("asks", flush=True)
with draining(gate, request):
    refusal = _answer(gate, request)
    print(json.dumps(None if refusal is None else [refusal.code, refusal.text]), flush=True)
    if refusal is None:
        with gate.change(gpu, lambda: (slot,)) as passed:
            print(gate.read(slot).generation, flush=True)
            sys.stdin.readline()
"""


@contextmanager
def command(folder: Path, *desires: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command that requests a driver for the first GPU."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), GPU, SLOT, *desires],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert output_line(process) == "asks"
        yield process
    finally:
        process.kill()
        process.communicate()


def output_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until_it_drains(gate: Gate) -> GateRecord:
    while gate.state(SLOT) is not GateState.DRAINING:
        pass
    found = gate.read(SLOT)
    assert isinstance(found, GateRecord)
    return found


async def seconds(node: SimNode, count: int) -> None:
    for _ in range(count):
        await node.report_account()
        await node.advance(1)


def acknowledged(gate: Gate) -> bool:
    found = gate.read(SLOT)
    return isinstance(found, GateRecord) and found.is_acknowledged


async def test_free_devices_are_drained_and_offered_again(simulated: Simulated, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.count(A10, GPU, SECOND)
        await seconds(node, 3)
        assert node.offered[A10] == {GPU: True, SECOND: True}
        with command(gate.folder, "native") as process:
            until_it_drains(gate)
            assert node.refused(A10, [GPU]) is ReasonCode.UNIT_BUSY, "at once, before the agent has read the gate"
            await seconds(node, 3)
            assert node.offered[A10] == {SECOND: True}
            assert node.reasons(GPU) == [ReasonCode.UNIT_BUSY]
            assert not acknowledged(gate), "the kubelet still counts the GPU"
            node.count(A10, SECOND)
            await seconds(node, 3)
            assert output_line(process) == "null"
            assert output_line(process) == "1", "the change is of the generation that was acknowledged"
            await seconds(node, 3)
            assert node.offered[A10] == {SECOND: True}
            node.allocate(A10, [SECOND])
            process.communicate("go\n")
        await seconds(node, 3)
        assert node.offered[A10] == {GPU: True, SECOND: True}
        node.allocate(A10, [GPU])


async def test_an_allocated_gpu_stays_listed_and_does_not_delay_the_answer(
    simulated: Simulated, tmp_path: Path
) -> None:
    """The command itself reads the allocations and names the pod."""
    gate = Gate(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.count(A10, GPU, SECOND)
        node.hold(A10, GPU)
        await seconds(node, 3)
        with command(gate.folder, "native") as process:
            until_it_drains(gate)
            await seconds(node, 4)
            assert node.offered[A10] == {GPU: True, SECOND: True}
            assert output_line(process) == "null"


@pytest.mark.parametrize(
    ("mode", "desires", "code"),
    [
        (DesiredMode.PASSTHROUGH, ["native"], ReasonCode.MANAGED),
        (DesiredMode.PASSTHROUGH, ["passthrough"], None),
        (DesiredMode.UNMANAGED, ["native"], None),
        (DesiredMode.UNMANAGED, ["vgpus"], None),
    ],
)
async def test_the_agent_refuses_a_change_that_it_would_undo(
    simulated: Simulated, tmp_path: Path, mode: DesiredMode, desires: list[str], code: ReasonCode | None
) -> None:
    gate = Gate(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path, Settings(mode=mode)) as node:
        await seconds(node, 3)
        with command(gate.folder, *desires) as process:
            until_it_drains(gate)
            await seconds(node, 4)
            answer = json.loads(output_line(process))
            assert (answer is None) == (code is None)
            if code is not None:
                assert answer[0] == code
                assert "would undo a change by hand" in answer[1]
                process.wait()
                await seconds(node, 3)
                assert gate.state(SLOT) is GateState.OPEN
                node.allocate(A10, [GPU])


async def test_the_intent_of_a_command_that_was_killed_is_cleared(simulated: Simulated, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await seconds(node, 3)
        with command(gate.folder, "native") as process:
            generation = until_it_drains(gate).generation
            process.send_signal(signal.SIGKILL)
            process.wait()
        await seconds(node, 4)
        found = gate.read(SLOT)
        assert isinstance(found, GateRecord)
        assert (found.state, found.generation, found.desires) == (GateState.OPEN, generation, {})
        node.allocate(A10, [GPU])


async def test_a_record_that_is_damaged_after_the_agent_has_read_its_state_stays(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_at(tmp_path / "locks")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        gate.path_of(SLOT, "json").write_bytes(b"torn")
        monkeypatch.setattr(Gate, "states_by_record", lambda _: {SLOT: GateState.DRAINING})
        await node.advance(2)
        assert gate.path_of(SLOT, "json").read_bytes() == b"torn"
        assert node.view.problems == ()


REQUEST = DrainRequest(UnitId(GPU), (SLOT,), f"unbind {GPU}", {GPU: ("native",)})


def test_an_agent_that_does_not_answer_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainrequest, "ANSWER_S", 0.1)
    gates = Gates(gate := gate_at(tmp_path / "gate"), tmp_path / "no kubelet", Anchor(tmp_path / "null"))
    with only_agent(tmp_path), beside_agents(gates, Agents(tmp_path, lambda: None), REQUEST) as refusal:
        assert refusal is not None
        assert refusal.code is ReasonCode.AGENT_SILENT
        assert str(gate.path_of(SLOT, "json")) in refusal.text
    assert gate.state(SLOT) is GateState.OPEN


def test_no_agent_starts_while_a_command_runs(tmp_path: Path) -> None:
    gates = Gates(gate := gate_at(tmp_path / "gate"), tmp_path / "no kubelet", Anchor(tmp_path / "null"))
    with beside_agents(gates, Agents(tmp_path, lambda: None), REQUEST) as refusal:
        assert (refusal, gate.state(SLOT)) == (None, GateState.OPEN)
        with pytest.raises(AlreadyRunningError, match="gpuvirt command"), only_agent(tmp_path):
            pass
        with no_agent(tmp_path) as found:
            assert found, "another command may run"
    with only_agent(tmp_path), no_agent(tmp_path) as found:
        assert not found

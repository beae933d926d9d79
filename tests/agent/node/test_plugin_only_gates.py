"""An unprivileged device plugin and the commands that change its GPUs: both pass gates in the plugin's own folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate import drainrequest
from gpuvirt.agent.change.gate.agentlock import only_agent
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, Membership, beside_agents
from gpuvirt.agent.change.gate.gate import Gate, Gates, plugin_gates
from gpuvirt.agent.change.gate.gatelock import Anchor, UnitUnsettledError
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, ReasonCode
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

GPU, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
SLOT = slot_of(GPU)
A10 = "nvidia.com/GA102GL_A10"
REQUEST = DrainRequest(UnitId(GPU), (SLOT,), f"unbind {GPU}", {GPU: ("native",)})

PRELUDE = """
import sys
from pathlib import Path
from gpuvirt.agent.change.gate.gatelock import Anchor
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, beside_agents
from gpuvirt.agent.change.gate.gate import gate_at
from gpuvirt.agent.change.gate.gate import Gates
folder, gpu, slot = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
gates = Gates(gate_at(folder / "locks"), folder / "device-plugins", Anchor(folder / "null"))
"""
CHANGE = """
with gates.change(gpu, lambda: (slot,)) as passed:
    passed.pause()
    passed.note("unbind it")
    print("changes", flush=True)
    sys.stdin.readline()
"""
COMMAND = """
print("asks", flush=True)
request = DrainRequest(gpu, (slot,), f"unbind {gpu}", {gpu: ("native",)})
with beside_agents(gates, Agents(folder / "agent", lambda: None), request) as refusal:
    print(None if refusal is None else refusal.code, flush=True)
    if refusal is None:
        with gates.change(gpu, lambda: (slot,)):
            print("changes", flush=True)
            sys.stdin.readline()
"""


@contextmanager
def program(folder: Path, script: str) -> Iterator["subprocess.Popen[str]"]:
    """Run another process that changes the first GPU."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(folder), GPU, SLOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def seconds(node: SimNode, count: int) -> None:
    for _ in range(count):
        await node.report_account()
        await node.advance(1)


@pytest.fixture
def device_plugins(tmp_path: Path) -> Path:
    (tmp_path / "device-plugins").mkdir()
    return tmp_path / "device-plugins"


async def test_a_gpu_that_a_command_changes_is_not_given(
    simulated: Simulated, tmp_path: Path, device_plugins: Path
) -> None:
    del device_plugins
    async with running_node(simulated("2xA10"), tmp_path, plugin_only=True) as node:
        await seconds(node, 3)
        with program(tmp_path, CHANGE) as command:
            assert says(command) == "changes"
            assert node.refused(A10, [GPU]) is ReasonCode.UNIT_BUSY
            assert node.allocate(A10, [SECOND]), "the control: the other GPU is given meanwhile"
            command.communicate("end\n")
        await seconds(node, 3)
        assert node.allocate(A10, [GPU])


async def test_a_gpu_that_was_just_given_is_not_changed(
    simulated: Simulated, tmp_path: Path, device_plugins: Path
) -> None:
    """Neither the kubelet's accounts nor the ledger show the allocation yet."""
    async with running_node(simulated("2xA10"), tmp_path, plugin_only=True) as node:
        await seconds(node, 3)
        node.allocate(A10, [GPU])
        (device_plugins.parent / "locks").mkdir(exist_ok=True)
        with program(tmp_path, CHANGE) as command:
            output, _ = command.communicate()
        assert (command.returncode, output) == (1, "")
        assert Gate(plugin_gates(device_plugins)).state(SLOT) is GateState.OPEN
        assert Gate(tmp_path / "locks").state(SLOT) is GateState.OPEN


def test_a_change_reads_the_lines_of_both_places(tmp_path: Path, device_plugins: Path) -> None:
    host = Gate(tmp_path / "locks")
    gates = Gates(host, device_plugins, Anchor(tmp_path / "null"))
    line = Gate(plugin_gates(device_plugins))
    gates.plugin.path_of(SLOT, "lock").write_text("0.0 4711 1 old\n")
    with pytest.raises(UnitUnsettledError, match="old"), gates.change(GPU, lambda: (SLOT,)):
        pass
    assert (line.state(SLOT), host.state(SLOT)) == (GateState.OPEN, GateState.OPEN)


async def test_the_plugin_withdraws_what_a_command_drains_and_answers_by_the_checkpoint(
    simulated: Simulated, tmp_path: Path, device_plugins: Path
) -> None:
    async with running_node(simulated("2xA10"), tmp_path, plugin_only=True) as node:
        node.count(A10, GPU, SECOND)
        await seconds(node, 3)
        with only_agent(device_plugins), program(tmp_path, COMMAND) as command:
            assert says(command) == "asks"
            gate = Gate(plugin_gates(device_plugins))
            while gate.state(SLOT) is not GateState.DRAINING:
                pass
            assert node.refused(A10, [GPU]) is ReasonCode.UNIT_BUSY
            await seconds(node, 3)
            assert node.offered[A10] == {SECOND: True}
            found = gate.read(SLOT)
            assert isinstance(found, GateRecord)
            assert not found.is_acknowledged, "the kubelet still counts the GPU"
            node.count(A10, SECOND)
            await seconds(node, 3)
            assert [says(command), says(command)] == ["None", "changes"]
            command.communicate("end\n")
        await seconds(node, 3)
        assert node.offered[A10] == {GPU: True, SECOND: True}


async def test_the_plugin_settles_the_change_of_a_killed_command(
    simulated: Simulated, tmp_path: Path, device_plugins: Path
) -> None:
    gate = Gate(plugin_gates(device_plugins))
    with program(tmp_path, CHANGE) as command:
        assert says(command) == "changes"
        command.kill()
        command.wait()
    assert (gate.state(SLOT), Gate(tmp_path / "locks").state(SLOT)) == (GateState.SETTLING, GateState.SETTLING)
    async with running_node(simulated("2xA10"), tmp_path, plugin_only=True) as node:
        await seconds(node, 3)
        assert gate.state(SLOT) is GateState.OPEN
        node.allocate(A10, [GPU])


def listed() -> Reason:
    return Reason(ReasonCode.AGENT_SILENT, GPU, "is listed")


@pytest.mark.parametrize("takes_part", [True, False])
def test_commands_refuse_what_a_plugin_without_gates_lists(
    tmp_path: Path, device_plugins: Path, monkeypatch: pytest.MonkeyPatch, *, takes_part: bool
) -> None:
    """Such as an older plugin, or one that may not write: nothing else knows whether it allocates a GPU."""
    monkeypatch.setattr(drainrequest, "ANSWER_S", 0.1)
    gates = Gates(Gate(tmp_path / "locks"), device_plugins, Anchor(tmp_path / "null"))
    with ExitStack() as stack:
        stack.enter_context(only_agent(device_plugins))
        if takes_part:
            stack.enter_context(only_agent_of(gates.plugin))
        refusal = stack.enter_context(beside_agents(gates, Agents(tmp_path / "agent", listed), REQUEST))
        assert refusal is not None
        assert (refusal.message == "is listed") != takes_part
        assert gates.plugin.state(SLOT) is GateState.DRAINING
    with beside_agents(gates, Agents(tmp_path / "agent", listed), REQUEST) as refusal:
        assert refusal is None, "no agent of gpuvirt offers anything: NVIDIA's plugin is as before"
        with pytest.raises(Exception, match="another gpuvirt agent"), only_agent(device_plugins):
            pass


@contextmanager
def only_agent_of(gate: Gate) -> Iterator[None]:
    member = Membership(gate)
    member.join()
    try:
        yield
    finally:
        member.leave()

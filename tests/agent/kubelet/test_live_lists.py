"""The present lists of device plugins, read from their sockets, and a command beside a plugin that can't be asked."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gate import plugin_gates
from gpuvirt.agent.kubelet import hostaccount
from gpuvirt.agent.kubelet.hostaccount import ListUnknownError, read_lists
from gpuvirt.cli.changes.commandhost import CommandHost, beside
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until

T = TypeVar("T")

GPU, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A10, SOCKET = "nvidia.com/GA102GL_A10", "kubevirt-GA102GL_A10.sock"


async def in_thread(job: Callable[[], T]) -> T:
    return await ThreadWorker("command").run(job, name="command", timeout_s=30.0)


def refusal(kernel: SimKernel, folder: Path) -> Reason | None:
    """Return why `gpuvirt vfio unbind` of the first GPU is refused beside the host's agents."""
    change_host, seen = change_host_in(folder, kernel, SimTools(kernel)), build_inventory(scan(kernel))
    own = folder / "command"  # by a path of its own it shares no state in memory with the agent
    if not own.is_symlink():
        own.symlink_to(folder / "device-plugins")
    command_host = CommandHost(replace(change_host, device_plugins=own), NOBODY, folder / "agent")
    desired = {GPU: DesiredGpu(DesiredDriver.NATIVE)}
    with beside(command_host, seen.gpus[GPU].unit, desired, seen, f"unbind {GPU}") as found:
        return found


@pytest.mark.parametrize("may_write", [True, False])
async def test_a_command_asks_a_plugin_or_reads_its_lists(short_path: Path, *, may_write: bool) -> None:
    kernel, folder = build_host(load_host("2xA10")), short_path / "device-plugins"
    gates = plugin_gates(folder) if may_write else Path("/proc/gates")
    options = replace(options_for(kernel, short_path), gates=gates, plugin_only=True)
    async with running(short_path, CLOCK) as kubelet, agent_on(options) as agent:
        await until(lambda: kubelet.allocatable() == {A10: 2})
        await until(lambda: agent.host_observed)
        lists = await in_thread(lambda: read_lists(folder))
        assert {path.name: set(map(str, ids)) for path, ids in lists.items()} == {SOCKET: {str(GPU), str(SECOND)}}
        notes = {note.code for note in agent.views.get().problems}
        assert (ReasonCode.GATE_FAILED in notes) != may_write
        found = await in_thread(lambda: refusal(kernel, short_path))
        if may_write:
            assert found is None, "the plugin has withdrawn the GPU, and the kubelet's checkpoint has it no longer"
        else:
            assert found is not None
            assert (found.code, Path(found.places[0].path).name) == (ReasonCode.AGENT_SILENT, SOCKET)
        await until(lambda: kubelet.allocatable() == {A10: 2})
    assert await in_thread(lambda: refusal(kernel, short_path)) is None, "no plugin listens any more"


def test_a_socket_that_cannot_be_connected_to_is_unknown(short_path: Path) -> None:
    folder = short_path / ("deep" * 30)
    folder.mkdir()
    (folder / "kubevirt-A10.sock").touch()
    with pytest.raises(ListUnknownError, match="too long"):
        read_lists(folder)


def test_a_folder_that_cannot_be_listed_is_unknown(tmp_path: Path) -> None:
    (folder := tmp_path / "device-plugins").symlink_to(folder)
    with pytest.raises(ListUnknownError, match="Too many levels of symbolic links"):
        read_lists(folder)


def test_a_plugin_that_does_not_say_what_it_lists_is_unknown(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostaccount, "TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_path / "kubevirt-silent.sock"))
        assert read_lists(short_path) == {}, "nobody listens"
        silent.listen()
        with pytest.raises(ListUnknownError, match=r"kubevirt-silent\.sock"):
            read_lists(short_path)


def test_a_plugin_that_does_not_accept_a_connection_is_unknown(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostaccount, "TIMEOUT_S", 0.2)
    path = str(short_path / "kubevirt-busy.sock")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(path)
        busy.listen(0)
        first.connect(path)
        with pytest.raises(ListUnknownError, match=r"kubevirt-busy\.sock"):
            read_lists(short_path)


@pytest.mark.parametrize(
    ("messages", "why"), [((), "has ended its list at once"), ((b"\xff\xff",), "a list of devices cannot be parsed")]
)
def test_a_plugin_without_a_list_is_unknown(short_path: Path, messages: Sequence[bytes], why: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        listing: grpc.RpcMethodHandler[bytes, bytes]
        listing = grpc.unary_stream_rpc_method_handler(lambda *_: iter(messages))
        methods = {"ListAndWatch": listing}
        server = grpc.server(pool, handlers=[grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)])
        server.add_insecure_port(f"unix:{short_path}/kubevirt-odd.sock")
        server.start()
        try:
            with pytest.raises(ListUnknownError, match=why):
                read_lists(short_path)
        finally:
            server.stop(None).wait()

"""systemd waits for the agent before it starts the kubelet."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main
from msgspec.structs import replace

from gpuvirt.agent.process import READY
from gpuvirt.cli.main import program_for
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until

UNIT = Path(__file__).parents[3] / "deploy/systemd/gpuvirt-node.service"


def at_path(folder: Path) -> tuple[str, str]:
    return (str(folder / "notify"),) * 2


def abstract(folder: Path) -> tuple[str, str]:
    return f"@{folder}", f"\0{folder}"


@pytest.mark.parametrize("place", [at_path, abstract])
async def test_systemd_is_notified_once_the_host_was_observed(
    short_path: Path, place: Callable[[Path], tuple[str, str]]
) -> None:
    (short_path / "device-plugins").mkdir()
    named, bound = place(short_path)
    options = replace(options_for(build_host(load_host("2xA10")), short_path), service_manager=named)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service_manager:
        service_manager.bind(bound)
        service_manager.setblocking(False)
        async with agent_on(options) as agent:
            received: list[bytes] = []

            def has_received() -> bool:
                try:
                    received.append(service_manager.recv(100))
                except BlockingIOError:
                    return False
                return True

            await until(has_received)
            assert received == [READY]
            assert agent.views.get().host_observed
            await CLOCK.sleep(0.3)
            assert not has_received(), "once is enough"


async def test_an_agent_runs_without_the_socket_that_it_was_told_of(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (short_path / "device-plugins").mkdir()
    options = options_for(build_host(load_host("2xA10")), short_path)
    async with agent_on(replace(options, service_manager=str(short_path / "gone"))) as agent:
        await until(lambda: "systemd can't be told" in caplog.text)
        assert agent.views.get().resources


def test_the_unit_starts_the_agent_with_options_that_it_has() -> None:
    (command,) = re.findall(r"^ExecStart=\S+/gpuvirt node (.*)$", UNIT.read_text(), re.MULTILINE)
    parameters = typer.main.get_command(program_for(["node"])).commands["node"].params  # type: ignore[attr-defined]
    known = {name for parameter in parameters for name in parameter.opts}
    assert {word for word in command.split() if word.startswith("--")} <= known

"""The agent as a separate process, as a DaemonSet runs it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuvirt.model.offers.view import NodeView
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.client import PluginClient

GPUVIRT = ["-m", "gpuvirt", "node"]
PLUGIN = ["-c", "from gpuvirt.cli.main import nvidia_kubevirt_gpu_device_plugin as main; main()"]


class Place:
    """A host folder and a kubelet folder, both outside the real root."""

    def __init__(self, folder: Path) -> None:
        self.host = folder / "host"
        self.sockets = folder / "kubelet/device-plugins"
        self.sockets.mkdir(parents=True)
        export(build_host(load_host("2xA10")), self.host)
        self.environment = {
            "PATH": os.environ["PATH"],  # noqa: TID251  handed on
            "GPUVIRT_HOST_ROOT": str(self.host),
            "GPUVIRT_KUBELET_DIR": str(self.sockets.parent),
            "GPUVIRT_LISTEN": "",
            "GPUVIRT_LOG_FORMAT": "json",
        }
        self.socket = self.sockets / "kubevirt-GA102GL_A10.sock"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )

    @contextmanager
    def agent(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, *command], env=self.environment, stderr=subprocess.PIPE, text=True
        ) as agent:
            try:
                while not self.socket.exists():
                    time.sleep(0.01)  # noqa: TID251  another process's time
                yield agent
            finally:
                agent.kill()


@pytest.fixture
def place(short_path: Path) -> Place:
    return Place(short_path)


REPORTING = """
import sys
from gpuvirt.cli.main import main
sys.argv[1:] = ["node"]
try:
    main()
finally:
    print("\\n" + " ".join(sys.modules), file=sys.stderr)
"""
"""Runs the agent, and lists at its end the modules that it has loaded."""


def test_an_agent_that_changes_no_gpus_runs_without_the_modules_for_that_and_without_yaml(place: Place) -> None:
    with place.agent("-c", REPORTING) as agent:
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(100) == 0
        assert agent.stderr is not None
        modules = set(agent.stderr.read().splitlines()[-1].split())
    assert "gpuvirt.agent.kubelet.plugins" in modules
    assert not {"yaml", "gpuvirt.agent.reconcile.reconciler", "gpuvirt.agent.change.unitchange"} & modules


@pytest.mark.parametrize("command", [GPUVIRT, PLUGIN])
def test_a_second_agent_is_refused_and_the_agent_ends_on_sigterm(place: Place, command: list[str]) -> None:
    with place.agent(*command) as agent:
        second = place.run(*command)
        assert second.returncode == 1
        assert "another gpuvirt agent serves this node" in second.stderr
        assert place.socket.exists()
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(100) == 0
        assert agent.stderr is not None
        lines = [json.loads(line) for line in agent.stderr.read().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert {line["reason"] for line in lines if "reason" in line} == {"AllocationsUnknown", "KubeletAway"}
    assert not list(place.sockets.glob("*.sock"))


def test_a_vgpu_config_that_waits_for_labels_is_reported(place: Place) -> None:
    """With a node's name, labels go before the settings, and there is no API server to read them from."""
    settings = place.host / "settings.yaml"
    settings.write_text("vgpu_config: A10-4Q")
    with place.agent(*GPUVIRT, "--config", str(settings), "--node-name", "node01") as agent:
        agent.send_signal(signal.SIGTERM)
        agent.wait(100)
        assert agent.stderr is not None
        (line,) = (line for line in agent.stderr if "vgpu_config" in line)
    found = json.loads(line)
    assert found["level"] == "warning"
    assert "vgpu_config: A10-4Q is not applied" in found["message"]
    assert "leave out --node-name, or give --kubeconfig" in found["message"]


def test_allocate_answers_with_paths_of_the_host(place: Place) -> None:
    async def allocate() -> list[str]:
        client = PluginClient(place.socket)
        await client.options()
        answer = await client.allocate([["0000:65:00.0"]])
        await client.close()
        return [device.host_path for container in answer.container_responses for device in container.devices]

    with place.agent(*GPUVIRT):
        assert asyncio.run(allocate()) == ["/dev/vfio/vfio", "/dev/vfio/12"]
        (spec,) = place.host.glob("run/cdi/*.json")
        assert str(place.host) not in spec.read_text()


def test_devices_shows_the_view_of_the_running_agent(place: Place) -> None:
    def devices() -> NodeView:
        return msgspec.json.decode(place.run("-m", "gpuvirt", "devices", "-o", "json").stdout, type=NodeView)

    with place.agent(*GPUVIRT) as agent:
        seen = devices()
        assert seen.agent is not None
        assert seen.agent.pid == agent.pid
        assert [resource.not_registered_because is not None for resource in seen.resources] == [True]
        agent.send_signal(signal.SIGTERM)
        agent.wait(100)
    assert devices().agent is None


def test_devices_ignores_the_view_of_a_killed_agent(place: Place) -> None:
    with place.agent(*GPUVIRT) as agent:
        agent.kill()
        agent.wait(100)
    assert (place.host / "run/gpuvirt/node.json").exists()
    done = place.run("-m", "gpuvirt", "devices")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(", read from the host")


def test_devices_validates_its_options_while_the_agent_runs(place: Place) -> None:
    bad = place.host / "bad.yaml"
    bad.write_text("offer: [bogus]")
    with place.agent(*GPUVIRT):
        for option, value in (("--config", bad), ("--pci-ids", place.host / "none")):
            assert place.run("-m", "gpuvirt", "devices", option, str(value)).returncode == 2


def test_an_empty_listen_variable_disables_the_metrics_server(place: Place) -> None:
    with place.agent(*GPUVIRT) as agent:
        agent.send_signal(signal.SIGTERM)
        agent.wait(100)
        assert agent.stderr is not None
        lines = [json.loads(line) for line in agent.stderr.read().splitlines()]
    assert place.environment["GPUVIRT_LISTEN"] == ""
    assert [line for line in lines if line["logger"].startswith("gpuvirt.web.")] == []
    assert "default: (:9410)" in " ".join(place.run("-m", "gpuvirt", "node", "--help").stdout.split())

"""`gpuvirt discover`: its looks over time, by hand, and as a process whose API server is away."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import EACCES
from pathlib import Path

import pytest

from gpuvirt.apps.discover import DiscoverOptions, Discovery
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.facts.ids import NodeName, PciAddress
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL
from gpuvirt.node.discoverer import LOOK_S, Discoverer
from gpuvirt.node.loops.serialworker import InlineWorker, SerialWorker
from gpuvirt.paths import HostPath
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.clock import SimClock
from gpuvirt.sim.export import export
from gpuvirt.sim.hostspec import load_host
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.tree import constant
from tests.commandline import ran
from tests.kubeletnode import until
from tests.simulated import Simulated

A10S = (PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0"))
DEVICES = HostPath("/sys/bus/pci/devices")
OS_RELEASE = HostPath("/etc/os-release")
DEBIAN = {OS_ID_LABEL: "debian", OS_VERSION_LABEL: None}


@asynccontextmanager
async def looking(kernel: SimKernel, worker: SerialWorker | None = None) -> AsyncIterator[tuple[Discoverer, SimClock]]:
    """Run a discoverer, in virtual time, for as long as the context lasts."""
    clock = SimClock()
    discoverer = Discoverer(kernel, worker or InlineWorker(), clock)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(discoverer.run())
        await clock.settle()
        yield discoverer, clock
        running.cancel()


async def test_what_changes_is_reported_at_the_next_look(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    async with looking(kernel) as (discoverer, clock):
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | DEBIAN
        kernel.tree.remove(OS_RELEASE)
        kernel.tree.place(OS_RELEASE, constant("ID=rhcos\nVERSION_ID=4.16\n"))
        kernel.unplug(A10S[0])
        await clock.advance(LOOK_S)
        system = {OS_ID_LABEL: "rhcos", OS_VERSION_LABEL: "4.16"}
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | system, "one GPU is left"
        kernel.unplug(A10S[1])
        await clock.advance(LOOK_S)
        assert discoverer.labels.get() == system, "it may be found again"
        await clock.advance(LOOK_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: None} | system
        kernel.plug_in(A10S[1])
        await clock.advance(LOOK_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | system


async def test_a_gpu_that_is_found_again_was_never_missed(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.unplug(A10S[0])
    async with looking(kernel) as (discoverer, clock):
        for _ in range(3):
            kernel.unplug(A10S[1])
            await clock.advance(LOOK_S)
            assert PRESENT_LABEL not in discoverer.labels.get()
            kernel.plug_in(A10S[1])
            await clock.advance(LOOK_S)
            assert discoverer.labels.get()[PRESENT_LABEL] == "true"


async def test_while_nothing_can_be_read_nothing_is_reported_of_it(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    async with looking(kernel) as (discoverer, clock):
        kernel.faults.fail(DEVICES, EACCES)
        kernel.faults.fail(OS_RELEASE, EACCES)
        await clock.advance(5 * LOOK_S)
        assert discoverer.labels.get() == {}
        kernel.faults.heal()
        await clock.advance(LOOK_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | DEBIAN


@pytest.fixture
def host(tmp_path: Path) -> Path:
    export(build_host(load_host("2xA10")), tmp_path / "host")
    return tmp_path / "host"


def test_a_person_sees_the_labels(host: Path) -> None:
    done = ran("discover", "--once", "--host-root", str(host))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{PRESENT_LABEL}=true", f"{OS_ID_LABEL}=debian", f"{OS_VERSION_LABEL}-"]


def test_a_person_is_told_what_can_not_be_told(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("ID=ubuntu\nVERSION_ID=22.04\n")
    done = ran("discover", "--once", "--host-root", str(tmp_path))
    assert done.stdout.splitlines() == [f"{OS_ID_LABEL}=ubuntu", f"{OS_VERSION_LABEL}=22.04"]
    assert (done.returncode, done.stderr) == (1, "gpuvirt: /sys/bus/pci/devices can't be read: ENOENT\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--node-name: is missing"),
        (("--node-name", "Node_1"), "--node-name: 'Node_1' is not a node's name"),
        (("--node-name", "node01"), "--kubeconfig: no API server"),
        (("--node-name", "node01", "--once"), "--kubeconfig: no API server"),
    ],
)
def test_what_is_missing_is_reported(host: Path, options: tuple[str, ...], said: str) -> None:
    done = ran("discover", "--host-root", str(host), *options)
    assert done.returncode == 2
    assert said in done.stderr


def nobody() -> Credentials:
    """Credentials for a port where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return Credentials("127.0.0.1", listener.getsockname()[1], "gpuvirt", token=b"x")


async def test_it_lives_and_is_not_ready_while_the_api_server_is_away(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.remove(OS_RELEASE)
    discovery = Discovery(DiscoverOptions(kernel, nobody(), NodeName("node01")))
    pages = discovery.pages()
    assert pages["/readyz"]().body.splitlines()[0] == "the host was not observed yet"
    async with asyncio.TaskGroup() as group:
        running = group.create_task(discovery.run())
        await until(lambda: len(discovery.missing()) == 3 and "not observed" not in discovery.missing()[0])
        unread, away, unknown = pages["/readyz"]().body.splitlines()
        assert unread == "/etc/os-release can't be read: ENOENT"
        assert "Connect call failed" in away
        assert unknown == "the API server has not shown node node01 yet"
        assert (pages["/healthz"]().status, pages["/readyz"]().status) == (200, 503)
        page = pages["/metrics"]().body.splitlines()
        assert f'gpuvirt_discovered{{label="{PRESENT_LABEL}",value="true"}} 1' in page
        assert "gpuvirt_discover_ready 0" in page
        running.cancel()


def test_as_a_process_it_ends_when_asked_to(host: Path, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{nobody().port}"}}}}]
users: [{{name: u, user: {{token: x}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
""")
    environment = {
        "PATH": os.environ["PATH"],  # noqa: TID251  handed on
        "GPUVIRT_HOST_ROOT": str(host),
        "GPUVIRT_NODE_NAME": "node01",
        "KUBECONFIG": str(kubeconfig),
        "GPUVIRT_LISTEN": "",
        "GPUVIRT_LOG_FORMAT": "json",
    }
    command = [sys.executable, "-m", "gpuvirt", "discover"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [json.loads(process.stderr.readline())["message"] for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    assert any(f"{PRESENT_LABEL}=true" in one for one in said)
    assert any("gpuvirt repeats it" in one for one in said)

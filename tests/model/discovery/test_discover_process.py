"""`gpuvirt discover`: its scans over time, by hand, and as a process without an API server."""

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

from gpuvirt.agent.discoverprocess import INTERVAL_S, Discoverer, DiscoverOptions, DiscoverProcess
from gpuvirt.facts.ids import NodeName, PciAddress
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.agent.kubelet.kubeletnode import until
from tests.cli.commandline import ran
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

A10S = (PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0"))
DEVICES = HostPath("/sys/bus/pci/devices")
OS_RELEASE = HostPath("/etc/os-release")
DEBIAN = {OS_ID_LABEL: "debian", OS_VERSION_LABEL: None}


@asynccontextmanager
async def discovering(
    kernel: SimKernel, worker: SerialWorker | None = None
) -> AsyncIterator[tuple[Discoverer, SimClock]]:
    """Run a discoverer, in virtual time, for as long as the context lasts."""
    clock = SimClock()
    discoverer = Discoverer(kernel, worker or InlineWorker(), clock)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(discoverer.run())
        await clock.settle()
        yield discoverer, clock
        running.cancel()


async def test_a_change_of_the_host_is_in_the_labels_after_the_next_scan(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    async with discovering(kernel) as (discoverer, clock):
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | DEBIAN
        kernel.tree.remove(OS_RELEASE)
        kernel.tree.place(OS_RELEASE, constant("ID=rhcos\nVERSION_ID=4.16\n"))
        kernel.unplug(A10S[0])
        await clock.advance(INTERVAL_S)
        system = {OS_ID_LABEL: "rhcos", OS_VERSION_LABEL: "4.16"}
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | system, "one GPU is left"
        kernel.unplug(A10S[1])
        await clock.advance(INTERVAL_S)
        assert discoverer.labels.get() == system, "the GPU may be found again"
        await clock.advance(INTERVAL_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: None} | system
        kernel.plug_in(A10S[1])
        await clock.advance(INTERVAL_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | system


async def test_the_label_stays_if_a_missing_gpu_is_found_again(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.unplug(A10S[0])
    async with discovering(kernel) as (discoverer, clock):
        for _ in range(3):
            kernel.unplug(A10S[1])
            await clock.advance(INTERVAL_S)
            assert PRESENT_LABEL not in discoverer.labels.get()
            kernel.plug_in(A10S[1])
            await clock.advance(INTERVAL_S)
            assert discoverer.labels.get()[PRESENT_LABEL] == "true"


async def test_labels_of_unreadable_facts_are_not_set(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    async with discovering(kernel) as (discoverer, clock):
        kernel.faults.fail(DEVICES, EACCES)
        kernel.faults.fail(OS_RELEASE, EACCES)
        await clock.advance(5 * INTERVAL_S)
        assert discoverer.labels.get() == {}
        kernel.faults.heal()
        await clock.advance(INTERVAL_S)
        assert discoverer.labels.get() == {PRESENT_LABEL: "true"} | DEBIAN


@pytest.fixture
def host(tmp_path: Path) -> Path:
    export(build_host(load_host("2xA10")), tmp_path / "host")
    return tmp_path / "host"


def test_discover_once_prints_the_labels(host: Path) -> None:
    done = ran("discover", "--once", "--host-root", str(host))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{PRESENT_LABEL}=true", f"{OS_ID_LABEL}=debian", f"{OS_VERSION_LABEL}-"]


def test_discover_once_prints_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("ID=ubuntu\nVERSION_ID=22.04\n")
    done = ran("discover", "--once", "--host-root", str(tmp_path))
    assert done.stdout.splitlines() == [f"{OS_ID_LABEL}=ubuntu", f"{OS_VERSION_LABEL}=22.04"]
    assert (done.returncode, done.stderr) == (1, "gpuvirt: /sys/bus/pci/devices can't be read: ENOENT\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "--node-name: is missing"),
        (("--node-name", "Node_1"), "--node-name: 'Node_1' is not a node's name"),
        (("--node-name", "node01"), "--kubeconfig: no API server"),
        (("--node-name", "node01", "--once"), "--kubeconfig: no API server"),
    ],
)
def test_a_missing_option_is_reported(host: Path, options: tuple[str, ...], expected: str) -> None:
    done = ran("discover", "--host-root", str(host), *options)
    assert done.returncode == 2
    assert expected in done.stderr


def no_server() -> Credentials:
    """Return credentials for a port where no server listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return Credentials("127.0.0.1", listener.getsockname()[1], "gpuvirt", token=b"x")


async def test_discover_is_live_but_not_ready_without_the_api_server(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.remove(OS_RELEASE)
    discovery = DiscoverProcess(DiscoverOptions(kernel, no_server(), NodeName("node01")))
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


def test_the_process_of_discover_ends_on_sigterm(host: Path, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{no_server().port}"}}}}]
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
        lines = [json.loads(process.stderr.readline())["message"] for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    assert any(f"{PRESENT_LABEL}=true" in line for line in lines)
    assert any("gpuvirt repeats it" in line for line in lines)

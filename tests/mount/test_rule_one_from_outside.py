"""Allocated devices stay, seen from outside: by the writes to the host, and by the kubelet's allocations.

The agent is a process of its own over a mounted host, whose operations take as long as on hardware, with a kubelet and
an API server on sockets.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.web.httpserver import MANY_NEWCOMERS, MOST_NEWCOMERS
from gpuvirt_sim.devices.nvidia import gpu_uuid
from tests.agent.kubelet.givingkubelet import give
from tests.mount import silentclients
from tests.mount.mounting import GPUVIRT
from tests.mount.outsidenode import CLOCK, OutsideNode, agent_of, outside_node
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("mount")

VGPU_LABEL, VGPU_STATE = "nvidia.com/vgpu.config", "nvidia.com/vgpu.config.state"
WORKLOAD_LABEL, WORKLOAD_STATE = "nvidia.com/gpu.workload.config", "gpuvirt.io/gpu.workload.state"
FOURTHS, TWELFTHS = "nvidia.com/NVIDIA_A10-4Q", "nvidia.com/NVIDIA_A10-12Q"
RTX = "nvidia.com/AD102_GEFORCE_RTX_4090"
RTXS = ("0000:0b:01.0", "0000:0b:02.0", "0000:0c:00.0")
SLOW = ("--slow", "remove=300ms", "--slow", "unbind=300ms")
TLS = tuple[Authority, Pair]
WORKLOAD_REASON = "gpuvirt.io/gpu.workload.reason"
EIGHTHS = "nvidia.com/GRID_T4-8Q"
T4, OTHER_T4S = "0000:86:00.0", ("0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0")
QUARTERS = "version: v1\nvgpu-configs:\n  quarters:\n    - {devices: all, vgpu-devices: {T4-4Q: 4}}\n"
PROBE_TIMEOUT_S = 1.5
COMMAND = " ".join(GPUVIRT)
VFIO_MANAGE = f'{sys.executable} -c "from gpuvirt.cli.main import vfio_manage; vfio_manage()"'
VGPU_DM = f'{sys.executable} -c "from gpuvirt.cli.main import nvidia_vgpu_dm; nvidia_vgpu_dm()"'
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")


@pytest.fixture(name="tls")
def make_tls(authority: Authority, server: Pair) -> TLS:
    return authority, server


def writes_to(node: OutsideNode, attribute: str) -> list[str]:
    return [line.data.strip() for line in node.writes() if line.path.endswith(f"/{attribute}")]


def succeeded(node: OutsideNode, state: str) -> bool:
    return node.api.labels.get(state) == "success"


@pytest.mark.parametrize("interfered", [True, False])
async def test_a_vgpu_label_that_is_reset_in_mid_change(short_path: Path, tls: TLS, interfered: bool) -> None:
    async with outside_node(short_path, tls, "2xA10-sriov", "mode: vgpu", *SLOW) as node:
        with agent_of(node):
            node.api.label(VGPU_LABEL, "A10-4Q")
            await node.until(lambda: node.allocatable(FOURTHS) == 12 and succeeded(node, VGPU_STATE))
            before = node.mdevs()
            node.api.label(VGPU_LABEL, "A10-12Q")
            await node.until(lambda: bool(writes_to(node, "remove")))
            if interfered:
                node.api.label(VGPU_LABEL, "A10-4Q")
                await node.give_until(FOURTHS, lambda: len(node.allocated) == 12)
                await node.until(lambda: succeeded(node, VGPU_STATE))
                assert node.harmed() == []
                assert {allocated.device for allocated in node.allocated} == before == node.mdevs()
            else:
                await node.until(lambda: node.allocatable(TWELFTHS) == 4 and succeeded(node, VGPU_STATE))
                assert len(writes_to(node, "remove")) == 12
                assert not before & node.mdevs()


@pytest.mark.parametrize("interfered", [True, False])
async def test_a_workload_label_that_is_reset_in_mid_change(short_path: Path, tls: TLS, interfered: bool) -> None:
    """Two of the GPUs share an IOMMU group, so that one change moves both, one function after the other."""
    async with outside_node(short_path, tls, "2xRTX4090-one-group", "workload_label: true", *SLOW) as node:
        with agent_of(node):
            node.api.label(WORKLOAD_LABEL, "vm-passthrough")
            await node.until(lambda: node.allocatable(RTX) == 3 and succeeded(node, WORKLOAD_STATE))
            node.api.label(WORKLOAD_LABEL, "container")
            await node.until(lambda: bool(writes_to(node, "unbind")))
            if interfered:
                node.api.label(WORKLOAD_LABEL, "vm-passthrough")
                await node.give_until(RTX, lambda: len(node.allocated) == 2)
                await node.until(lambda: succeeded(node, WORKLOAD_STATE))
                assert node.harmed() == []
                assert [node.driver(gpu) for gpu in RTXS] == ["vfio-pci"] * 3
            else:
                await node.until(lambda: succeeded(node, WORKLOAD_STATE))
                assert [node.driver(gpu) for gpu in RTXS] == ["nvidia"] * 3


TURING, TURINGS = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A", ("0000:04:00.0", "0000:af:00.0")
IN_A_POD = (
    "unshare --mount --pid --fork --mount-proc sh -c 'mkdir -p host/var/lib/kubelet"
    " && mount --bind kubelet host/var/lib/kubelet && HOST_ROOT=host {command}'"
)
"""NVIDIA's vfio-manager pod has the host's / at HOST_ROOT, and a PID namespace of its own."""


@pytest.mark.parametrize(
    "command",
    [
        f"{COMMAND} vfio unbind GPU --host-root host --kubelet-dir kubelet",
        f"{VFIO_MANAGE} unbind -d GPU --host-root host --kubelet-dir kubelet",
        pytest.param(IN_A_POD.format(command=f"{VFIO_MANAGE} unbind -d GPU"), marks=AS_ROOT),
    ],
)
async def test_a_gpu_that_the_agent_gave_to_a_pod_stays(short_path: Path, tls: TLS, command: str) -> None:
    async with outside_node(short_path, tls, "4xRTX2060", "", *SLOW) as node:
        with agent_of(node):
            await node.until(lambda: node.allocatable(TURING) > 1)
            count = node.allocatable(TURING)
            pod = await node.give_one(TURING)
            given, free = node.allocated[0].device, next(gpu for gpu in TURINGS if gpu != node.allocated[0].device)
            assert node.driver(given) == node.driver(free) == "vfio-pci"
            refused = await node.run(command.replace("GPU", given))
            assert (refused.returncode, node.driver(given)) == (1, "vfio-pci")
            assert f"allocated to pod default/{pod}" in " ".join(refused.stdout.split())
            assert node.harmed() == []
            done = await node.run(command.replace("GPU", free))
            assert (done.returncode, node.driver(free)) == (0, "nvidia"), done.stdout + done.stderr
            await node.until(lambda: node.allocatable(TURING) < count)
            assert node.harmed() == []


async def test_a_vgpu_that_the_agent_gave_to_a_pod_stays(short_path: Path, tls: TLS) -> None:
    (short_path / "config.yaml").write_text(QUARTERS)
    where = "--host-root host --kubelet-dir kubelet"
    async with outside_node(short_path, tls, "4xT4", "", *SLOW) as node:
        with agent_of(node):
            await node.until(lambda: node.allocatable(EIGHTHS) == 3)
            pod = await node.give_one(EIGHTHS)
            given = node.allocated[0].device
            for command in (f"{COMMAND} vgpu delete {given}", f"{VGPU_DM} apply -f config.yaml"):
                output = ""
                while f"pod default/{pod}" not in output:
                    refused = await node.run(f"{command} {where}")
                    assert (refused.returncode, given in node.mdevs()) == (1, True)
                    output = " ".join(refused.stdout.split())
                    known = f"pod default/{pod}" in output
                    assert known or "AllocationsUnknown" in output, "10 s after the allocation"
                    assert node.harmed() == []
            free = next(iter(node.mdevs() - {given}))
            done = await node.run(f"{COMMAND} vgpu delete {free} {where}")
            assert (done.returncode, free in node.mdevs()) == (0, False), done.stdout + done.stderr
            assert node.harmed() == []


async def test_a_gpu_of_a_container_pod_that_is_idle_stays_with_its_driver(short_path: Path, tls: TLS) -> None:
    async with outside_node(short_path, tls, "4xT4", "workload_label: true", *SLOW) as node:
        await give(node.kubelet, "nvidia.com/gpu", [gpu_uuid(PciAddress(T4))])
        with agent_of(node):
            node.api.label(WORKLOAD_LABEL, "vm-passthrough")
            await node.until(lambda: [node.driver(gpu) for gpu in OTHER_T4S] == ["vfio-pci"] * 3)
            await node.until(lambda: "default/cuda" in node.api.annotations.get(WORKLOAD_REASON, ""))
            assert node.driver(T4) == "nvidia"
            assert not [line for line in node.writes() if T4 in f"{line.path} {line.data}"]
            node.kubelet.end_pod("cuda")
            await node.until(lambda: node.driver(T4) == "vfio-pci")


async def test_silent_connections_do_not_keep_the_kubelet_from_asking(short_path: Path, tls: TLS) -> None:
    port = free_port()
    async with outside_node(short_path, tls, "2xA10-sriov", "mode: vgpu", *SLOW) as node:
        with agent_of(node, listen=f"127.0.0.1:{port}"):
            node.api.label(VGPU_LABEL, "A10-4Q")
            await node.until(lambda: node.allocatable(FOURTHS) == 12)
            answers: list[str] = []
            command = [sys.executable, silentclients.__file__, str(port), str(MOST_NEWCOMERS + MANY_NEWCOMERS)]
            with running(command) as silent:
                node.api.label(VGPU_LABEL, "A10-12Q")
                while node.allocatable(TWELFTHS) != 4 or len(answers) < 20:
                    answers.append(await asyncio.to_thread(health, port))  # noqa: TID251
                    await CLOCK.sleep(0.1)
                assert silent.poll() is None
            assert Counter(answers) == {"HTTP/1.1 200 OK": len(answers)}


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def health(port: int) -> str:
    """Send the kubelet's probe, with its short timeout."""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            return connection.recv(1000).decode().partition("\r\n")[0]
    except OSError as error:
        return repr(error)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

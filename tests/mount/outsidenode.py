"""A node of real processes and sockets: a mounted host, an agent, a kubelet, an API server."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpuvirt.clock import RealClock
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.mounted.record import Begun, parse_line
from tests.mount.mounting import GPUVIRT, mount, shell
from tests.mount.nodeapi import NODE, NodeApi, serving
from tests.web.certificates import Authority, Pair

CLOCK = RealClock()
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Allocated:
    """A device that the kubelet has allocated to a pod."""

    device: str
    at: datetime
    """When the plugin answered."""

    @property
    def prefix(self) -> str:
        """The part that texts about the device contain: an mdev's UUID, or the PCI slot of its functions."""
        return self.device.rpartition(".")[0] or self.device


class OutsideNode:
    """The node, with its folder and its peers."""

    def __init__(self, folder: Path, api: NodeApi, kubelet: SimKubelet) -> None:
        self.folder = folder
        self.host = folder / "host"
        self.api = api
        self.kubelet = kubelet
        self.allocated: list[Allocated] = []

    def write_settings(self, text: str) -> None:
        """Write the settings that the agent starts with."""
        (self.folder / "settings.yaml").write_text(text)

    def writes(self) -> list[Begun]:
        """Return the writes to the host in order, from the host's own record."""
        lines = (self.folder / "record").read_bytes().splitlines()
        return [line for line in map(parse_line, lines) if isinstance(line, Begun)]

    def driver(self, address: str) -> str | None:
        try:
            return (self.host / "sys/bus/pci/devices" / address / "driver").readlink().name
        except FileNotFoundError:
            return None

    def mdevs(self) -> set[str]:
        return {mdev.name for mdev in (self.host / "sys/bus/mdev/devices").iterdir()}

    def allocatable(self, resource: str) -> int:
        return self.kubelet.allocatable().get(resource, 0)

    async def until(self, met: Callable[[], bool]) -> None:
        """Wait until a condition is met; fail after PATIENCE_S."""
        async with asyncio.timeout(PATIENCE_S):
            while not met():
                await CLOCK.sleep(0.02)

    async def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command line in the node's folder, while the kubelet continues to run."""
        return await asyncio.get_running_loop().run_in_executor(None, shell, command, self.folder)

    async def give_one(self, resource: str) -> str:
        """Run a pod that requests one device, and return the pod's name."""
        name = f"vm-{len(self.allocated)}"
        pod = await self.kubelet.run_pod(name, Container("compute", {resource: 1}))
        self.allocated += [Allocated(device, CLOCK.now()) for held in pod.held for device in held.devices]
        return name

    async def give(self, resource: str) -> None:
        """Run pods that request one device each, as long as there are devices."""
        while self.allocatable(resource):
            try:
                await self.give_one(resource)
            except AdmissionError:
                return  # Allocate was refused, so the pod has no device

    async def give_until(self, resource: str, met: Callable[[], bool]) -> None:
        """Allocate devices as soon as they are offered, until a condition is met; none of them may be changed."""
        async with asyncio.timeout(PATIENCE_S):
            while not met():
                await self.give(resource)
                assert self.harmed() == []
                await CLOCK.sleep(0.02)

    def harmed(self) -> list[tuple[Allocated, Begun]]:
        """Return the writes to a device or its sibling functions after the kubelet allocated the device to a pod."""
        return [
            (allocated, write)
            for write in self.writes()
            for allocated in self.allocated
            if write.time > allocated.at and allocated.prefix in f"{write.path} {write.data}"
        ]


@asynccontextmanager
async def outside_node(
    folder: Path, tls: tuple[Authority, Pair], simulated: str, settings: str, *options: str
) -> AsyncIterator[OutsideNode]:
    """Run a node; `options` are the options of the mount."""
    api, kubelet_dir = NodeApi(), folder / "kubelet"
    recording = ("--nodes", "files", "--record", str(folder / "record"))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(api, *tls, folder / "kubeconfig"))
        kubelet = await stack.enter_async_context(running(kubelet_dir, CLOCK))
        stack.enter_context(mount(folder / "host", simulated, *recording, *options))
        node = OutsideNode(folder, api, kubelet)
        node.write_settings(settings)
        yield node


@contextmanager
def agent_of(node: OutsideNode, listen: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Run the agent of a node."""
    folder = node.folder
    paths = {"host-root": "host", "kubelet-dir": "kubelet", "config": "settings.yaml", "kubeconfig": "kubeconfig"}
    arguments = [f"--{option}={folder / name}" for option, name in paths.items()]
    with (
        (folder / "agent.log").open("ab") as log,
        subprocess.Popen(
            [*GPUVIRT, "node", *arguments, f"--node-name={NODE}", f"--listen={listen}"], stderr=log
        ) as agent,
    ):
        try:
            yield agent
        finally:
            agent.kill()

"""Nodes with a simulated kubelet on real sockets, whose agents create vGPUs on demand and may be killed."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.agent.options import NodeOptions
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import StartError, start_container
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.ondemand.pods import ON_DEMAND

T4_1Q, T4_8Q, T4_16Q = "tencent.com/vgpu-230", "tencent.com/vgpu-233", "tencent.com/vgpu-234"
CONTAINERS = ("nvidia", "compute")
MOST_STARTS = 600
"""How often a container that does not start is tried again: for half a minute."""


def host(gpus: int) -> SimKernel:
    """Return a host with T4s, and a kubelet among its processes."""
    slots = tuple(SlotSpec(at=f"0000:{0x10 + index:02x}:00.0", board="T4", group=40 + index) for index in range(gpus))
    kernel = build_host(HostSpec(about=f"{gpus} T4", slots=slots))
    kernel.start_process("kubelet")
    return kernel


def options_of(kernel: SimKernel, folder: Path) -> NodeOptions:
    """Return the options of an agent in mode on-demand."""
    change_host = change_host_in(folder, kernel, SimTools(kernel))
    change_host = replace(change_host, locks=folder / "locks")
    return replace(options_for(kernel, folder, ON_DEMAND), change_host=change_host, cdi_folder=folder / "cdi")


@dataclass
class Node:
    """A node whose agent creates vGPUs on demand; the test starts and ends pods."""

    kernel: SimKernel
    kubelet: SimKubelet
    folder: Path
    vgpus: dict[str, frozenset[str]] = field(default_factory=dict)
    """The vGPUs of each pod that runs."""

    @property
    def live(self) -> set[str]:
        """The vGPUs of the host."""
        return set(self.kernel.listdir(MDEVS))

    @property
    def given(self) -> set[str]:
        """The vGPUs of all pods that run."""
        return set[str]().union(*self.vgpus.values())

    async def start(self, name: str, resource: str, count: int = 1) -> Pod:
        """Run a pod whose init container loads the driver, as in Tencent's document; raise AdmissionError."""
        pod = await self.admit(name, resource, count)
        for container in CONTAINERS:
            await start_container(self.kubelet, pod, container, self.folder / "cdi")
        self.take(pod)
        return pod

    async def admit(self, name: str, resource: str, count: int = 1) -> Pod:
        """Admit such a pod; raise AdmissionError."""
        limits = {resource: count}
        return await self.kubelet.run_pod(name, Container("nvidia", limits, init=True), Container("compute", limits))

    def take(self, pod: Pod) -> None:
        """Assert that a pod that has started has its vGPUs, in all its containers the same."""
        init, main = (self._named(pod, container) for container in CONTAINERS)
        assert init == main, [(held.container, held.devices, held.answer) for held in pod.held]
        self.vgpus[pod.name] = main
        assert main <= self.live

    def _named(self, pod: Pod, container: str) -> frozenset[str]:
        return frozenset(vgpu for value in pod.env(container).values() for vgpu in value.split(","))

    def end(self, name: str) -> None:
        """End a pod."""
        self.kubelet.end_pod(name)
        del self.vgpus[name]

    async def until_counted(self, resource: str, count: int) -> None:
        """Wait until the kubelet counts so many vGPUs of a resource."""
        await until(lambda: self.kubelet.allocatable().get(resource) == count)

    async def until_all_counted(self, count: int) -> None:
        """Wait until the kubelet counts so many vGPUs of each resource, as a scheduler does before it places a pod.

        A kubelet that does not know a resource yet starts a pod that requests it without a vGPU.
        """
        for resource in (T4_1Q, T4_8Q, T4_16Q):
            await self.until_counted(resource, count)


@asynccontextmanager
async def node_with(gpus: int, folder: Path) -> AsyncIterator[Node]:
    """Run a node whose kubelet counts each type on each GPU."""
    kernel = host(gpus)
    async with running(folder, CLOCK) as kubelet, agent_on(options_of(kernel, folder)):
        node = Node(kernel, kubelet, folder)
        await node.until_all_counted(gpus)
        yield node


class MortalAgent:
    """An agent that can be killed: its files stay as they were at that moment.

    It ends within the test's process, and its files are reset to that moment. A process of its own would need the
    mounted simulator, which is far slower, and would test the ledger no better.
    """

    def __init__(self, options: NodeOptions, kubelet: SimKubelet, group: asyncio.TaskGroup) -> None:
        self._options = options
        self._kubelet = kubelet
        self._group = group
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the agent; return once it runs."""
        running_now = asyncio.Event()

        async def live() -> None:
            async with agent_on(self._options):
                running_now.set()
                await asyncio.Event().wait()

        self._task = self._group.create_task(live())
        await running_now.wait()

    async def kill(self) -> None:
        """End the agent, and undo what its orderly end has written.

        The kubelet gets none of the answers of that end: what they rest on is undone.
        """
        await self._kubelet.lose_plugins()
        folder, before = self._options.ledger.parent, self._files()
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for path in self._files().keys() - before.keys():
            path.unlink()
        for path, content in before.items():
            assert path.parent == folder
            path.write_bytes(content)

    def _files(self) -> Mapping[Path, bytes]:
        """Return the agent's own files: its ledger, and what it keeps beside it."""
        return {path: path.read_bytes() for path in self._options.ledger.parent.glob("*.json")}


async def start_at_last(node: Node, pod: Pod) -> None:
    """Start a pod's containers as the kubelet does, which tries again while the agent is away or refuses."""
    for container in CONTAINERS:
        why: BaseException | None = None
        for _ in range(MOST_STARTS):
            try:
                await start_container(node.kubelet, pod, container, node.folder / "cdi")
            except (AdmissionError, StartError, asyncio.CancelledError) as error:
                why = error  # a killed kubelet closes the connection, which cancels the call
                await CLOCK.sleep(0.05)
            else:
                break
        else:
            raise AssertionError(f"{pod.name} does not start") from why
    node.take(pod)

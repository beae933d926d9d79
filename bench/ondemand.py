"""How long pods wait for vGPUs on demand: creation at Allocate, removal after a pod's end, and job after job.

The agent, its sockets, its intervals and the kubelet's calls are real. The host is a simulated kernel in the same
process, which creates and removes vGPUs faster than a real one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.vgpuchanges import agent_on, options_of, until
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.ondemand.podends import PodEnds
from gpuvirt.node.agent import Agent
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.hostspec import HostSpec, SlotSpec
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.containers import Container
from gpuvirt.sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt.sim.kubelet.manager import AdmissionError
from gpuvirt.sim.kubelet.starting import start_container

SMALL, WHOLE = "tencent.com/vgpu-230", "tencent.com/vgpu-234"
EACH = 16
"""The small vGPUs that a GPU carries."""
GPUS = 8
REMOVALS = 20


@dataclass(frozen=True, slots=True)
class OnDemandFigures:
    """What was measured, in seconds."""

    allocations: list[float]
    """From the kubelet's decision to admit a pod until it has the answer, the creation included."""
    removals: list[float]
    """From a pod's end until the kernel lacks its vGPU."""
    jobs: list[float]
    """The same as `allocations` for pods of a full GPU, each as the last one ends: the removal included."""
    refused_jobs: int


@dataclass(frozen=True, slots=True)
class _Node:
    kernel: SimKernel
    kubelet: SimKubelet
    folder: Path
    agent: Agent

    @property
    def vgpus(self) -> Sequence[str]:
        return self.kernel.listdir(MDEVS)

    async def start(self, name: str, resource: str) -> tuple[Pod, float]:
        """Run a pod; return it, and the seconds of its admission."""
        began = time.monotonic()
        pod = await self.kubelet.run_pod(name, Container("compute", {resource: 1}))
        took_s = time.monotonic() - began
        await start_container(self.kubelet, pod, "compute", self.folder / "cdi")
        return pod, took_s

    def end(self, name: str) -> None:
        """End a pod, which the agent learns from the API server as in a cluster."""
        uid = PodUid(self.kubelet.pods[name].uid)
        self.kubelet.end_pod(name)
        self.agent.observe_pod_ends(PodEnds(ended=frozenset({uid})))


def _host(gpus: int) -> SimKernel:
    slots = tuple(SlotSpec(at=f"0000:{0x10 + index:02x}:00.0", board="T4", group=40 + index) for index in range(gpus))
    kernel = build_host(HostSpec(about=f"{gpus} T4", slots=slots))
    kernel.start_process("kubelet")
    return kernel


@asynccontextmanager
async def _node(gpus: int, folder: Path) -> AsyncIterator[_Node]:
    kernel = _host(gpus)
    options = replace(
        options_of(kernel, folder), settings=Settings(mode=DesiredMode.ON_DEMAND), cdi_folder=folder / "cdi"
    )
    async with running(folder, RealClock()) as kubelet, agent_on(options) as agent:
        both = {SMALL: gpus, WHOLE: gpus}
        await until(lambda: both.items() <= kubelet.allocatable().items(), kubelet.allocatable)
        yield _Node(kernel, kubelet, folder, agent)


async def measure(jobs: int, work: Path) -> OnDemandFigures:
    """Measure; the numbers of small vGPUs and removals are fixed. `work` has the folders `many` and `jobs`."""
    allocations, removals = await _measure_creations(work / "many")
    durations, refused = await _measure_jobs(jobs, work / "jobs")
    return OnDemandFigures(allocations, removals, durations, refused)


async def _measure_creations(folder: Path) -> tuple[list[float], list[float]]:
    allocations: list[float] = []
    removals: list[float] = []
    async with _node(GPUS, folder) as node:
        for number in range(GPUS * EACH):
            await until(lambda: _has_free(node.kubelet), node.kubelet.allocatable)
            _, took_s = await node.start(f"pod-{number}", SMALL)
            allocations.append(took_s)
        for number in range(REMOVALS):
            left = len(node.vgpus) - 1
            began = time.monotonic()
            node.end(f"pod-{number}")
            await until(partial(_are_left, node, left), lambda: node.vgpus)
            removals.append(time.monotonic() - began)
    return allocations, removals


def _has_free(kubelet: SimKubelet) -> bool:
    return kubelet.allocatable().get(SMALL, 0) > len(kubelet.pods)


def _are_left(node: _Node, count: int) -> bool:
    return len(node.vgpus) == count


async def _measure_jobs(count: int, folder: Path) -> tuple[list[float], int]:
    durations: list[float] = []
    refused = 0
    async with _node(1, folder) as node:
        for number in range(count):
            try:
                _, took_s = await node.start(f"job-{number}", WHOLE)
            except AdmissionError:
                refused += 1
                await asyncio.sleep(6.0)  # a refusal ends the waits of the next pods for 5 s
                continue
            durations.append(took_s)
            node.end(f"job-{number}")
    return durations, refused

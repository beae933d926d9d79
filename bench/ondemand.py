"""How long pods wait for vGPUs on demand: creation at Allocate, removal after a pod's end, and job after job.

The agent, its sockets, its intervals and the kubelet's calls are real. The agent runs in a process of its own
(`bench.ondemandagent`), with a simulated kernel that creates and removes vGPUs faster than a real one; the kubelet is
simulated in this process, so that its work delays no answer.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.vgpuchanges import until
from gpuvirt.clock import RealClock
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import start_container

SMALL, WHOLE = "tencent.com/vgpu-230", "tencent.com/vgpu-234"
EACH = 16
"""The small vGPUs that a GPU carries."""
GPUS = 8
REMOVALS = 20
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class OnDemandFigures:
    """The measured times in seconds, and the number of refused jobs."""

    allocations: list[float]
    """From the kubelet's decision to admit a pod until it has the answer, the creation included."""
    cpu_s: float
    """The processor time of the agent for the admission and start of such a pod, observations included."""
    removals: list[float]
    """From a pod's end until the kernel lacks its vGPU."""
    jobs: list[float]
    """The same as `allocations` for pods of a full GPU, each as the last one ends: the removal included."""
    refused_jobs: int


class _Agent:
    """The agent's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, request: str) -> str:
        """Return the answer to a line."""
        reader, writer = self._process.stdout, self._process.stdin
        if reader is None or writer is None:
            raise SystemExit("the agent's process has no pipes")
        if request:
            writer.write(f"{request}\n".encode())
        answer = (await reader.readline()).decode().strip()
        if not answer:
            raise SystemExit("the agent has ended")
        return answer

    @property
    def cpu_s(self) -> float:
        """The processor time that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Node:
    kubelet: SimKubelet
    folder: Path
    agent: _Agent

    async def vgpus(self) -> int:
        """Return how many vGPUs exist."""
        return int(await self.agent.ask("vgpus"))

    async def start(self, name: str, resource: str) -> float:
        """Run a pod; return the seconds of its admission."""
        pod = await self.kubelet.run_pod(name, Container("compute", {resource: 1}))
        await start_container(self.kubelet, pod, "compute", self.folder / "cdi")
        return pod.plugins_s

    async def end(self, name: str) -> None:
        """End a pod, which the agent learns from the API server as in a cluster."""
        uid = self.kubelet.pods[name].uid
        self.kubelet.end_pod(name)
        await self.agent.ask(f"end {uid}")


@asynccontextmanager
async def _node(gpus: int, folder: Path, checkout: Path | None) -> AsyncIterator[_Node]:
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join((str(checkout / "src"), str(checkout / "simulator/src")))
    async with running(folder, RealClock()) as kubelet:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.ondemandagent", str(folder), str(gpus)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        agent = _Agent(process)
        try:
            await agent.ask("")
            both = {SMALL: gpus, WHOLE: gpus}
            await until(lambda: both.items() <= kubelet.allocatable().items(), kubelet.allocatable)
            yield _Node(kubelet, folder, agent)
        finally:
            process.kill()
            await process.wait()


async def measure(jobs: int, work: Path, checkout: Path | None = None) -> OnDemandFigures:
    """Measure the agent of this checkout, or of another one; `work` has the folders `many` and `jobs`.

    The numbers of small vGPUs and removals are fixed.
    """
    allocations, cpu_s, removals = await _measure_creations(work / "many", checkout)
    durations, refused = await _measure_jobs(jobs, work / "jobs", checkout)
    return OnDemandFigures(allocations, cpu_s, removals, durations, refused)


async def _measure_creations(folder: Path, checkout: Path | None) -> tuple[list[float], float, list[float]]:
    allocations: list[float] = []
    removals: list[float] = []
    async with _node(GPUS, folder, checkout) as node:
        before_s = node.agent.cpu_s
        for number in range(GPUS * EACH):
            await until(lambda: _has_free(node.kubelet), node.kubelet.allocatable)
            allocations.append(await node.start(f"pod-{number}", SMALL))
        cpu_s = (node.agent.cpu_s - before_s) / len(allocations)
        for number in range(REMOVALS):
            left = await node.vgpus() - 1
            began = time.monotonic()
            await node.end(f"pod-{number}")
            while await node.vgpus() != left:  # noqa: ASYNC110  the agent is another process
                await asyncio.sleep(POLL_S)
            removals.append(time.monotonic() - began)
    return allocations, cpu_s, removals


def _has_free(kubelet: SimKubelet) -> bool:
    return kubelet.allocatable().get(SMALL, 0) > len(kubelet.pods)


async def _measure_jobs(count: int, folder: Path, checkout: Path | None) -> tuple[list[float], int]:
    durations: list[float] = []
    refused = 0
    async with _node(1, folder, checkout) as node:
        for number in range(count):
            try:
                durations.append(await node.start(f"job-{number}", WHOLE))
            except AdmissionError:
                refused += 1
                await asyncio.sleep(6.0)  # a refusal ends the waits of the next pods for 5 s
                continue
            await node.end(f"job-{number}")
    return durations, refused

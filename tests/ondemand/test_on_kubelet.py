"""On-demand vGPUs with a simulated kubelet on real sockets: jobs after jobs, many pods, and restarts amid them."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.model.offers.ondemand.podends import PodEnds
from gpuvirt.node.ondemand.patience import PAUSE_S
from gpuvirt.node.options import NodeOptions
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.hostspec import HostSpec, SlotSpec
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.containers import Container
from gpuvirt.sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt.sim.kubelet.manager import AdmissionError
from gpuvirt.sim.kubelet.starting import start_container
from gpuvirt.sim.programs.tools import SimTools
from tests.changes import site_in
from tests.kubeletnode import CLOCK, agent_on, options_for, until
from tests.ondemand.pods import ON_DEMAND

T4_1Q, T4_8Q, T4_16Q = "tencent.com/vgpu-230", "tencent.com/vgpu-233", "tencent.com/vgpu-234"


def host(gpus: int) -> SimKernel:
    slots = tuple(SlotSpec(at=f"0000:{0x10 + index:02x}:00.0", board="T4", group=40 + index) for index in range(gpus))
    kernel = build_host(HostSpec(about=f"{gpus} T4", slots=slots))
    kernel.start_process("kubelet")
    return kernel


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
        return set(self.kernel.listdir(MDEVS))

    async def start(self, name: str, resource: str, count: int = 1) -> Pod:
        """Run a pod whose init container loads the driver, as in Tencent's document."""
        limits = {resource: count}
        pod = await self.kubelet.run_pod(name, Container("nvidia", limits, init=True), Container("compute", limits))
        for container in ("nvidia", "compute"):
            await start_container(self.kubelet, pod, container, self.folder / "cdi")
        vgpus = [value.split(",") for value in pod.env().values()]
        self.vgpus[name] = frozenset(vgpu for part in vgpus for vgpu in part)
        assert self.vgpus[name] <= self.live
        return pod

    def end(self, name: str) -> None:
        self.kubelet.end_pod(name)
        del self.vgpus[name]

    async def until_counted(self, resource: str, count: int) -> None:
        await until(lambda: self.kubelet.allocatable().get(resource) == count)


def options_of(kernel: SimKernel, folder: Path) -> NodeOptions:
    moves = site_in(folder, kernel, SimTools(kernel))
    moves = replace(moves, locks=folder / "locks")
    return replace(options_for(kernel, folder, ON_DEMAND), moves=moves, cdi_folder=folder / "cdi")


def _are(node: Node, vgpus: set[str]) -> bool:
    return node.live == vgpus


def listed(kubelet: SimKubelet, resource: str) -> list[str]:
    return sorted(kubelet.manager.resources[resource].healthy)


@asynccontextmanager
async def node_with(gpus: int, folder: Path) -> AsyncIterator[Node]:
    kernel = host(gpus)
    async with running(folder, CLOCK) as kubelet, agent_on(options_of(kernel, folder)):
        node = Node(kernel, kubelet, folder)
        for resource in (T4_1Q, T4_8Q, T4_16Q):
            await node.until_counted(resource, gpus)
        yield node


async def started(node: Node, name: str) -> frozenset[str] | None:
    """Start a pod that fills a GPU, and return its vGPUs; None if there was no room in time."""
    try:
        await node.start(name, T4_16Q)
    except AdmissionError as error:
        if "NoRoom" not in str(error):
            raise
        return None
    return node.vgpus[name]


@pytest.mark.timeout(300)
async def test_a_job_after_each_job_gets_a_vgpu_that_no_job_had(short_path: Path) -> None:
    async with node_with(1, short_path) as node:
        had: set[str] = set()
        for number in range(30):
            # The GPU is full: each waits for the removal of the last one's vGPU, too long on a busy computer.
            while (vgpus := await started(node, f"job-{number}")) is None:
                await CLOCK.sleep(PAUSE_S)
            assert not vgpus & had
            had |= vgpus
            node.end(f"job-{number}")
        await until(lambda: not node.live)
        await node.until_counted(T4_8Q, 1)


async def test_a_job_is_admitted_in_the_moment_in_which_the_api_tells_of_the_last_ones_end(short_path: Path) -> None:
    """Neither refusal ends a pod for good here: the kubelet's, for an empty list, or the agent's."""
    kernel = host(1)
    async with running(short_path, CLOCK) as kubelet, agent_on(options_of(kernel, short_path)) as agent:
        node = Node(kernel, kubelet, short_path)
        await node.until_counted(T4_16Q, 1)
        for number in range(5):
            await node.start(f"job-{number}", T4_16Q)
            ids = listed(kubelet, T4_16Q)
            await until(lambda: bool(agent.on_demand_pods))  # the agent knows the pod, as after some seconds
            agent.observe_pod_ends(PodEnds(ended=frozenset(agent.on_demand_pods)))
            await until(lambda: listed(kubelet, T4_16Q) != ids)  # noqa: B023
            assert len(listed(kubelet, T4_16Q)) == 1
            node.end(f"job-{number}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_vgpu_is_without_its_pod_and_no_pod_without_its_vgpu(short_path: Path, seed: int) -> None:
    random, kernel, refused = Random(seed), host(8), Counter[str]()  # noqa: S311
    async with running(short_path, CLOCK) as kubelet:
        node = Node(kernel, kubelet, short_path)
        for round_ in range(4):
            async with agent_on(options_of(kernel, short_path)):  # each round is a restart of the agent
                await until(lambda: bool(kubelet.allocatable().get(T4_1Q)))
                for number in range(30):
                    if node.vgpus and random.random() < 0.45:
                        node.end(random.choice(sorted(node.vgpus)))
                        continue
                    name, resource = f"pod-{round_}-{number}", random.choice((T4_1Q, T4_8Q, T4_16Q))
                    try:
                        await node.start(name, resource)
                    except AdmissionError as error:
                        refused[str(error).partition(" ")[0]] += 1
                if round_ == 1:
                    await kubelet.restart()
                    await until(lambda: bool(kubelet.allocatable().get(T4_1Q)))
                expected = set[str]().union(*node.vgpus.values())
                assert expected <= node.live
                await until(partial(_are, node, expected))
        assert sum(len(vgpus) for vgpus in node.vgpus.values()) == len(node.live)  # no vGPU has two pods
        async with agent_on(options_of(kernel, short_path)):
            for name in list(node.vgpus):
                node.end(name)
            await until(lambda: not node.live)
            await node.until_counted(T4_8Q, 8)


async def test_the_counts_of_other_types_fall_with_the_first_vgpu(short_path: Path) -> None:
    async with node_with(1, short_path) as node:
        await node.start("a", T4_8Q)
        await node.until_counted(T4_8Q, 2)
        await node.until_counted(T4_16Q, 0)
        assert node.kubelet.capacity()[T4_16Q] == 0
        with pytest.raises(AdmissionError):
            await node.start("b", T4_16Q)
        await node.start("c", T4_8Q)
        assert len(node.live) == 2


async def test_pods_are_admitted_again_by_a_restarted_kubelet(short_path: Path) -> None:
    async with node_with(2, short_path) as node:
        await node.start("a", T4_8Q)
        before = node.live
        await node.kubelet.restart()
        await until(lambda: bool(node.kubelet.allocatable().get(T4_8Q)))
        await CLOCK.sleep(0.3)
        assert node.live == before
        pod = node.kubelet.pods["a"]
        await start_container(node.kubelet, pod, "compute", node.folder / "cdi")

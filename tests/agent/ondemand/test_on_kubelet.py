"""On-demand vGPUs with a simulated kubelet on real sockets: jobs after jobs, and a restart of the kubelet."""

import asyncio
import threading
from pathlib import Path

import pytest

from gpuvirt.agent.ondemand.ondemandallocator import PAUSE_S
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import StartError, start_container
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, until
from tests.agent.ondemand.kubeletnodes import T4_8Q, T4_16Q, Node, host, node_with, options_of
from tests.thoroughness import sized


async def started(node: Node, name: str) -> frozenset[str] | None:
    """Start a pod that fills a GPU, and return its vGPUs; None if there was no room in time."""
    try:
        await node.start(name, T4_16Q)
    except AdmissionError as error:
        if "NoRoom" not in str(error):
            raise
        return None
    return node.vgpus[name]


@pytest.mark.timeout(600)
async def test_a_job_after_each_job_gets_a_vgpu_that_no_job_had(short_path: Path) -> None:
    async with node_with(1, short_path) as node:
        had: set[str] = set()
        for number in range(sized(200, 30)):
            # The GPU is full: each waits for the removal of the last one's vGPU, too long on a busy computer.
            while (vgpus := await started(node, f"job-{number}")) is None:
                await CLOCK.sleep(PAUSE_S)
            assert not vgpus & had
            had |= vgpus
            node.end(f"job-{number}")
        await until(lambda: not node.live)
        await node.until_counted(T4_8Q, 1)


async def test_each_gpu_has_one_thread_for_the_creation_of_vgpus(short_path: Path) -> None:
    def creators() -> int:
        return sum(thread.name.startswith("create on ") for thread in threading.enumerate())

    before = creators()
    async with node_with(1, short_path) as node:
        for number in range(4):
            while await started(node, f"job-{number}") is None:
                await CLOCK.sleep(PAUSE_S)
            node.end(f"job-{number}")
        assert creators() == before + 1


async def test_a_job_is_admitted_in_the_moment_in_which_the_api_tells_of_the_last_ones_end(short_path: Path) -> None:
    """Neither refusal ends a pod for good here: the kubelet's, for an empty list, or the agent's."""
    kernel = host(1)
    async with running(short_path, CLOCK) as kubelet, agent_on(options_of(kernel, short_path)) as agent:
        node = Node(kernel, kubelet, short_path)
        await node.until_counted(T4_16Q, 1)
        for number in range(5):
            await node.start(f"job-{number}", T4_16Q)
            ids = kubelet.manager.resources[T4_16Q].healthy
            # the agent knows the pod, as after some seconds
            await until(lambda: bool(agent.observations.on_demand_pods))
            agent.observations.observe_pod_ends(PodEnds(ended=agent.observations.on_demand_pods))
            await until(lambda: kubelet.manager.resources[T4_16Q].healthy != ids)  # noqa: B023
            assert len(kubelet.manager.resources[T4_16Q].healthy) == 1
            node.end(f"job-{number}")


async def test_a_container_starts_although_the_kubelet_has_written_its_record_without_it(short_path: Path) -> None:
    """Seen on a real kubelet once in some hundred pods: no list came after it, and the pod waited for ever."""
    async with node_with(1, short_path) as node:
        node.kubelet.overtakes_writes = True
        pod = await node.kubelet.run_pod("a", Container("compute", {T4_8Q: 1}))
        with pytest.raises(StartError, match="does not assign this vGPU to the container"):
            await start_container(node.kubelet, pod, "compute", node.folder / "cdi")
        await CLOCK.sleep(1.0)  # the lists of the allocation are sent
        node.kubelet.overtakes_writes = False
        async with asyncio.timeout(30):
            while not await is_started(node, pod):
                await CLOCK.sleep(0.05)


async def is_started(node: Node, pod: Pod) -> bool:
    try:
        await start_container(node.kubelet, pod, "compute", node.folder / "cdi")
    except StartError:
        return False
    return True


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

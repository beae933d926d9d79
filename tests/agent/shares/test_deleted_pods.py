"""A pod that is deleted by force keeps its share while its containers run: no other pod gets its units."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.clock import BEAT_S, RealClock, Timer
from gpuvirt.facts.ids import PciAddress, PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu, SharedGpus
from gpuvirt_sim.kubelet.kubelet import Pod
from gpuvirt_sim.kubelet.manager import AdmissionError
from tests.agent.kubelet.kubeletnode import until
from tests.agent.shares.sharednode import APP, GPUS, INIT, RECHECK_S, SharedNode, shared_node

A, B = GPUS


async def fill(node: SharedNode) -> Pod:
    """Start a pod with a whole GPU on each of both, and return the one on the first."""
    first = await node.admit("p", 1000, gpu="GPU-a")
    await node.start(first)
    assert await node.run("q", 1000, "GPU-b") == "GPU-b"
    return first


async def leave_running(node: SharedNode) -> Pod:
    """Delete the pod on the first GPU by force, and stop the agent; the next one lets pods wait for 3 s for room."""
    first = await fill(node)
    node.delete_by_force(first)
    await node.stop_agent()
    node.room_s = 3.0
    return first


class WaitClock(RealClock):
    """Makes a call when Allocate has begun to wait between two readings, for the first time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]

    @override
    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        if delay_s == RECHECK_S and self._calls:
            asyncio.get_running_loop().call_soon(self._calls.pop())
        return super().call_later(delay_s, call)


def stop(node: SharedNode, pod: Pod) -> None:
    """Block the event loop for longer than Allocate waits for room; the pod ends meanwhile."""
    node.end_processes(pod)
    assert threading.Event().wait(node.room_s + BEAT_S) is False


async def test_a_pod_that_is_deleted_by_force_keeps_its_gpu_while_its_container_runs(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        first = await fill(node)
        node.delete_by_force(first)
        for _ in range(5):
            await node.agent.allocator.tidy()
        assert node.used(A) == 1000
        assert len(node.specs) == 2
        with pytest.raises(AdmissionError, match=r"NoRoom: .*pod default/p: .*processes of it still run"):
            await node.admit("r", 1000, gpu="GPU-a")
        node.end_processes(first)
        await until(lambda: node.used(A) == 0)
        assert await node.run("s", 1000, "GPU-a") == "GPU-a"


async def test_a_pod_waits_for_room_while_the_agent_runs(short_path: Path) -> None:
    """The time in which the computer stopped the agent does not count: a refused pod fails for good."""
    async with shared_node(short_path) as node:
        first = await leave_running(node)
        node.clock = WaitClock(lambda: stop(node, first))
        await node.start_agent()
        assert await node.run("r", 1000, "GPU-a") == "GPU-a"


async def test_a_stop_while_allocate_reads_the_processes_does_not_count(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        first = await leave_running(node)
        loop, awaited = asyncio.get_running_loop(), threading.Event()

        def read_and_stop(uids: Collection[PodUid]) -> frozenset[PodUid] | Unread:
            running = read_running_pods(node.host, uids)
            if awaited.is_set():
                awaited.clear()
                loop.call_soon_threadsafe(stop, node, first)  # before the loop takes the result of this job
            return running

        node.kept_s, node.running_pods = 1000.0, read_and_stop
        await node.start_agent()
        await until(lambda: bool(node.agent.shares.state.get().kept))  # and from now on Allocate alone reads
        awaited.set()
        assert await node.run("r", 1000, "GPU-a") == "GPU-a"


async def test_a_pod_that_only_the_kubelets_record_has_keeps_its_gpu(short_path: Path) -> None:
    """The API server has lost the pod, as after a restore of etcd, and the kubelet has not observed that yet."""
    async with shared_node(short_path) as node:
        first = await fill(node)
        node.lose(first)
        node.end_processes(first)  # its container has crashed, and the kubelet will start it again
        for _ in range(5):
            await node.agent.allocator.tidy()
        assert node.used(A) == 1000
        node.kubelet.end_pod("p")
        await until(lambda: node.used(A) == 0)


async def test_an_init_container_of_a_deleted_pod_keeps_the_pods_gpu(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit_all("p", [("first", INIT, 600), ("main", APP, 600)], "GPU-a")
        await node.start(pod, "first")
        node.delete_by_force(pod)
        for _ in range(5):
            await node.agent.allocator.tidy()
        assert node.used(A) == 600


async def test_nothing_ends_while_processes_cannot_be_seen(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 1000, gpu="GPU-a")
        await node.start(pod)
        node.host.processes.hide()
        node.end(pod)
        for _ in range(5):
            await node.agent.allocator.tidy()
        assert node.used(A) == 1000
        node.host.processes.hide(hidden=False)
        await until(lambda: node.used(A) == 0)


async def test_nothing_ends_while_the_kubelets_record_is_unknown(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 1000, gpu="GPU-a")
        await node.start(pod)
        await node.stop_agent()
        node.end(pod)
        node.kubelet.paths.checkpoint.write_bytes(b"{")
        agent = node.restarted()
        for _ in range(5):
            await agent.allocator.tidy()
        assert list(agent.store.records.get().pods) == [pod.uid]


def kept_by_gpu(node: SharedNode) -> Mapping[GpuId, Units]:
    shares = node.agent.shares
    return shares.state.get().kept_by_gpu(shares.records)


async def test_the_scheduler_does_not_count_the_units_that_a_deleted_pod_keeps(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-a")
        await node.start(pod)
        assert not kept_by_gpu(node)
        node.lose(pod)
        await until(lambda: kept_by_gpu(node) == {A: 300})
        gpus = SharedGpus(tuple(SharedGpu(PciAddress("0000:02:00.0"), gpu, Units(1000)) for gpu in GPUS))
        kept = tuple(replace(gpu, kept=kept_by_gpu(node).get(gpu.id or A, Units(0))) for gpu in gpus.gpus)
        assert replace(gpus, gpus=kept).schedulable == {A: 700, B: 1000}
        node.end_processes(pod)
        await until(lambda: not kept_by_gpu(node))
        assert node.used(A) == 300, "the kubelet's record has it, and the scheduler need not know"
        node.kubelet.end_pod("p")
        await until(lambda: node.used(A) == 0)

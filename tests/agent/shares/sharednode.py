"""A node with shared GPUs: the plugin of units and a simulated kubelet on real sockets; the test is the API server."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.kubelet.units import RecordedUnits, UnitOffer
from gpuvirt.agent.shares.limitfiles import DriverLimits, LimitFiles, MpsLimits
from gpuvirt.agent.shares.nodeshares import NodePods, NodeShares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies, RunningPods
from gpuvirt.agent.shares.sharefiles import FILE, RecordStore, SpecFiles
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.node.shares import ObservedShares, ShareState
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Units, demand_of
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.processes import Process
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt_sim.kubelet.starting import Started, start_container
from tests.agent.kubelet.kubeletnode import CLOCK, FAST, until
from tests.agent.shares.opengpus import OpenGpus, decide, decide_when_observed

log = logging.getLogger(__name__)

VGPU = ResourceName("nvidia.com/vgpu")
GPUS = (GpuId("GPU-a"), GpuId("GPU-b"))
MINORS = {GPUS[0]: 0, GPUS[1]: 1}
BOTH = NodeSharing({gpu: Units(1000) for gpu in GPUS}, minors=MINORS)
PROGRAM = Path("/proc/self/exe").read_bytes()[:20]
ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + PROGRAM[18:]
"""The beginning of a library."""
LIBRARY = Path("/usr/local/lib/gpuvirt/libvgpu.so")
RECHECK_S = 0.01
"""How long Allocate waits for room between two readings."""
INIT, SIDECAR, APP = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP


def nvidia_spec(gpus: Mapping[GpuId, int]) -> str:
    """Return NVIDIA's spec of these GPUs, named by index."""
    return json.dumps(
        {
            "cdiVersion": "0.5.0",
            "kind": "nvidia.com/gpu",
            "devices": [
                {"name": str(minor), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{minor}"}]}}
                for minor in gpus.values()
            ],
            "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": [{"path": "/dev/nvidiactl"}]},
        }
    )


class Agent:
    """The agent's part for units; a second one on the same folder is a restart."""

    def __init__(
        self,
        folder: Path,
        published: NodeSharing,
        pods: NodePods,
        running_pods: RunningPods,
        enforcement: Enforcement,
        room_s: float,
        kept_s: float,
        clock: Clock,
    ) -> None:
        worker = ThreadWorker("specs")
        files = SpecFiles(folder / "cdi", (folder / "etc-cdi", folder / "cdi"))
        self.store = RecordStore(folder / FILE, ThreadWorker("records"))
        self.store.load(files.contents())
        kubelet = KubeletPaths(folder)
        limits = LimitFiles(LIBRARY, folder / "host", folder / "run/ld.so.preload")
        state, observed = Cell(ShareState()), Cell(ObservedShares(runtime="containerd://2.4.2"))
        mps = MpsLimits((folder / "driver", folder / "host"), folder / "run/mps/pipe")
        driver = DriverLimits(folder / "memory-limit", folder / "memory-limit-of-image")
        self.shares = NodeShares(self.store, files, pods, state, observed, limit_files=limits, mps=mps, driver=driver)
        self.share(replace(published, enforcement=enforcement))
        accounts = Accounts(RecordedUnits(kubelet, VGPU).read, running_pods)
        on = Dependencies(
            self.shares,
            clock,
            worker,
            accounts,
            OpenGpus(),
            lambda: decide(self.shares),
            room_s=room_s,
            pod_s=0.3,
            recheck_s=RECHECK_S,
            kept_s=kept_s,
        )
        self.offer = UnitOffer(on, kubelet, FAST, lambda _, state: log.info("%s", state))
        self.allocator = self.offer.allocator

    def share(self, published: NodeSharing) -> None:
        """Have these GPUs shared from now on."""
        self.shares.follow(self.shares.state.get().with_published(published))


class SharedNode:
    """The node, with the pods that the API server has."""

    def __init__(self, folder: Path, kubelet: SimKubelet) -> None:
        self.folder = folder
        self.kubelet = kubelet
        self.published = BOTH
        self.enforcement = Enforcement.NONE
        self.room_s = 0.3
        """How long a pod waits for room; for agents that start from now on, as the next three."""
        self.kept_s = 0.05
        self.running_pods: RunningPods = lambda uids: read_running_pods(self.host, uids)
        self.clock: Clock = CLOCK
        self.pods = NodePods()
        self.api: dict[PodUid, PodOnNode] = {}
        self.pods.observe({})
        self.host = build_host(load_host("vm-2xV100"))
        self.processes: dict[str, Process] = {}
        """The process of each pod that keeps the pod's namespaces, by the pod's UID."""
        self._stack = AsyncExitStack()
        self.agent: Agent

    @property
    def records(self) -> ShareRecords:
        return self.agent.store.records.get()

    @property
    def specs(self) -> list[Path]:
        """The files of shares in the folder of CDI specs."""
        return sorted(path for path in (self.folder / "cdi").iterdir() if "share" in path.name)

    def used(self, gpu: GpuId) -> int:
        """Return the units that pods have of a GPU by the records."""
        return sum(pod.placement.used.get(gpu, 0) for pod in self.records.pods.values())

    def share(self, published: NodeSharing) -> None:
        """Have these GPUs shared from now on."""
        self.published = published
        self.agent.share(replace(published, enforcement=self.enforcement))

    async def start_agent(self, *, api_server: bool = True) -> None:
        if not api_server:
            self.pods = NodePods()
        self.agent = self.restarted()
        await self._stack.enter_async_context(_running(self.agent))
        shares = self.agent.shares
        await until(lambda: bool(shares.state.get().node.capacity) or bool(shares.state.get().withheld))
        count = sum(shares.state.get().node.capacity.values())
        await until(lambda: self.kubelet.allocatable().get(VGPU, 0) >= count)

    def restarted(self) -> Agent:
        """Return a new agent, which does not run yet."""
        running, waits = self.running_pods, (self.room_s, self.kept_s, self.clock)
        return Agent(self.folder, self.published, self.pods, running, self.enforcement, *waits)

    async def stop_agent(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    def bind(self, name: str, uid: str, containers: Sequence[tuple[str, ContainerKind, int]], gpu: str | None) -> None:
        """Let the API server report a pod, whose containers all have a GPU by its annotation."""
        demand = demand_of(
            [ContainerDemand(ContainerName(container), kind, Units(units)) for container, kind, units in containers]
        )
        chosen = (
            {container.name: {GpuId(gpu): container.units} for container in demand.containers}
            if gpu is not None
            else None
        )
        desired = placement(demand, chosen) if chosen is not None else None
        self.api[PodUid(uid)] = PodOnNode(PodUid(uid), "default", name, demand, desired)
        self.pods.observe(dict(self.api))

    async def admit(self, name: str, *units: int, gpu: str | None = None, report: bool = True) -> Pod:
        """Admit a pod with an app container for each number of units."""
        return await self.admit_all(name, [(f"c{number}", APP, unit) for number, unit in enumerate(units)], gpu, report)

    async def admit_all(
        self, name: str, containers: Sequence[tuple[str, ContainerKind, int]], gpu: str | None = None,
        report: bool = True,
    ) -> Pod:  # fmt: skip
        asked = [Container(container, {VGPU: units}, init=kind is not APP) for container, kind, units in containers]
        pod = await self.kubelet.run_pod(name, *asked)
        if report:
            self.bind(name, pod.uid, containers, gpu)
        return pod

    async def start(self, pod: Pod, container: str = "c0", own: Mapping[str, str] | None = None) -> Started:
        started = await start_container(self.kubelet, pod, container, self.folder / "cdi", own)
        if pod.uid not in self.processes:
            self.processes[pod.uid] = self.host.start_process("pause", pod=pod.uid)
        return started

    async def run(self, name: str, units: int, gpu: str | None = None) -> str:
        """Admit a pod with one container, start it, and return its GPU."""
        return (await self.start(await self.admit(name, units, gpu=gpu))).env["GPUVIRT_GPUS"]

    def end(self, pod: Pod, *, deleted: bool = True) -> None:
        """End a pod at the kubelet and at the API server."""
        self.end_processes(pod)
        self.kubelet.end_pod(pod.name)
        uid = PodUid(pod.uid)
        if deleted:
            del self.api[uid]
        else:
            self.api[uid] = replace(self.api[uid], ended=True)
        self.pods.observe(dict(self.api))

    def end_processes(self, pod: Pod) -> None:
        """End the processes of a pod."""
        if (process := self.processes.pop(pod.uid, None)) is not None:
            self.host.end_vm(process)

    def lose(self, pod: Pod) -> None:
        """Lose a pod at the API server, which the kubelet has not observed yet."""
        del self.api[PodUid(pod.uid)]
        self.pods.observe(dict(self.api))

    def delete_by_force(self, pod: Pod) -> None:
        """Delete a pod with `--force`: API server and kubelet have forgotten it, and its containers run on."""
        self.kubelet.end_pod(pod.name)
        self.lose(pod)


@asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = group.create_task(agent.offer.run()), group.create_task(decide_when_observed(agent.shares))
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def shared_node(folder: Path, gpus: Mapping[GpuId, int] = MINORS) -> AsyncIterator[SharedNode]:
    """Run the plugin of units and a kubelet for as long as the context lasts."""
    (folder / "cdi").mkdir()
    (folder / "cdi/nvidia.yaml").write_text(nvidia_spec(gpus))
    async with running(folder, CLOCK) as kubelet:
        node = SharedNode(folder, kubelet)
        await node.start_agent()
        try:
            yield node
        finally:
            await node.stop_agent()


def spec_env(path: Path) -> list[str]:
    """Return the variables of the device of a spec."""
    content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    (device,) = msgspec.json.decode(content["devices"], type=list[dict[str, msgspec.Raw]])
    edits = msgspec.json.decode(device["containerEdits"], type=dict[str, msgspec.Raw])
    return msgspec.json.decode(edits["env"], type=list[str])

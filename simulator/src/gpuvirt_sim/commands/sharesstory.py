"""The chapter of the demo about shares of GPUs: four pods on two GPUs, and one that does not fit."""

from pathlib import Path

import msgspec

from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.cli.output.fleetrender import print_shares
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Units, demand_of
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.overview import PodShare, SharesOverview, overview, short_ids
from gpuvirt.model.shares.sharedgpus import SharedGpu
from gpuvirt_sim.commands.story import DemoStuckError, Stage, Story
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import Started, start_container

HOST = "vm-2xV100"
"""A worker VM with two GPUs."""
NODE = NodeName("node01")
NAMESPACE = "research"
FITTING = {"train": 600, "tune": 600, "serve": 300, "notebook": 200}
TOO_LARGE = ("batch", 300)
"""Fits into what is free in all, and on no single GPU."""
RUNTIME = "containerd://2.1.3"
MAIN = "main"


class SharesStory(Story):
    """The chapter about shares."""

    def __init__(self, stage: Stage, cdi: Path, *, chapter: int = 0) -> None:
        """`cdi` is the folder of CDI specs, which the agent writes and a container runtime reads."""
        super().__init__(stage, chapter=chapter)
        if stage.agent.shares is None:
            raise DemoStuckError("the agent of the demo shares no GPUs")
        self._cdi = cdi
        self._shares: NodeShares = stage.agent.shares
        self._pods: dict[PodUid, PodOnNode] = {}

    async def play_shares(self) -> None:
        """Play the chapter."""
        self.say("")
        self.open()
        self.say("The agent's settings have `mode: shared`: a whole GPU has 1000 units, and pods request some of them.")
        await self.until(lambda: len(self._gpus()) > 1, "the agent's first observation of the host")
        self._describe_gpus()
        self._shares.observe_node(RUNTIME)
        self._shares.pods.observe({})
        resource = self._shares.resource
        await self.until(
            lambda: self.kubelet.allocatable().get(resource) == self._units(), "the kubelet to count units"
        )
        self.head("Pods share the GPUs of a node", f"kubectl get node {NODE} -o yaml")
        self.counts("Allocatable", {resource: self._units()})
        names = short_ids(gpu.id for gpu in self._gpus() if gpu.id is not None)
        for name, units in FITTING.items():
            started = await self._run(name, units)
            gpu = next(short for gpu, short in names.items() if gpu in started.env["GPUVIRT_GPUS"])
            self.say(f"pod {NAMESPACE}/{name} requests {resource}: {units}, and gets {gpu}: {_nodes(started)}")
        await self._refused(*TOO_LARGE)
        self.head("What each GPU has left", "gpuvirt shares")
        print_shares(self.out, self._overview())

    async def _refused(self, name: str, units: int) -> None:
        self.say(f"pod {NAMESPACE}/{name} requests {self._shares.resource}: {units}. The agent refuses it:")
        try:
            await self._admit(name, units)
        except AdmissionError as error:
            self.say(str(error), style="yellow")
            return
        raise DemoStuckError(f"the agent has given {units} units that no GPU has left")

    async def _run(self, name: str, units: int) -> Started:
        pod = await self._admit(name, units)
        demand = demand_of([ContainerDemand(ContainerName(MAIN), ContainerKind.APP, Units(units))])
        self._pods[PodUid(pod.uid)] = PodOnNode(PodUid(pod.uid), NAMESPACE, name, demand)
        self._shares.pods.observe(dict(self._pods))
        return await start_container(self.kubelet, pod, MAIN, self._cdi)

    async def _admit(self, name: str, units: int) -> Pod:
        return await self.kubelet.run_pod(name, Container(MAIN, {self._shares.resource: units}))

    def _overview(self) -> SharesOverview:
        records = self._shares.store.records.get()
        pods = {uid: PodShare(f"{pod.namespace}/{pod.name}", pod.demand.total) for uid, pod in records.pods.items()}
        return overview({NODE: records.usage(self._shares.state.get().node.capacity)}, pods)

    def _gpus(self) -> tuple[SharedGpu, ...]:
        return self.agent.views.get().shared.gpus

    def _units(self) -> int:
        return sum(gpu.units or 0 for gpu in self._gpus())

    def _describe_gpus(self) -> None:
        """Write the CDI spec that NVIDIA's toolkit writes on a node."""
        devices = [
            {"name": str(gpu.minor), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{gpu.minor}"}]}}
            for gpu in self._gpus()
        ]
        common = {"deviceNodes": [{"path": "/dev/nvidiactl"}]}
        spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": common}
        self._cdi.mkdir(parents=True, exist_ok=True)
        (self._cdi / "nvidia.json").write_bytes(msgspec.json.encode(spec))


def _nodes(started: Started) -> str:
    return " ".join(dict.fromkeys(started.device_nodes))

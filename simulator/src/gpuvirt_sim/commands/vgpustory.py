"""The chapters of the demo about vGPUs: the node's label changes while a VM uses a vGPU."""

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.desired.observed import NodeRequest, Observed, StateName
from gpuvirt.model.desired.vgpuconfig import builtin_configs
from gpuvirt.model.inventory.naming import from_type
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt_sim.commands.story import DemoStuckError, Stage, Story
from gpuvirt_sim.devices.vfs import Carrier
from gpuvirt_sim.devices.vgpu import VgpuTypeSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container

MORE_THAN_DEFAULT = 3
"""The config `default` creates two vGPUs on a GPU; the label then requests at least this number."""


class Cast(msgspec.Struct, frozen=True):
    """The GPUs and the vGPU types of the story."""

    gpus: tuple[PciAddress, ...]
    """GPUs of one kind of card, which can carry vGPUs."""
    resources: frozenset[str]
    """The resources of all their vGPU types."""
    requested: VgpuTypeSpec
    """The vGPU type that the label requests."""

    @property
    def config(self) -> str:
        """The config that the label names."""
        return profile_name(self.requested.name)


def cast_of(kernel: SimKernel) -> Cast | None:
    """Return the GPUs of a simulated host that the story can show, None without such GPUs."""
    for first in (carrier for _, carrier in sorted(kernel.vfs.carriers.items())):
        requested = _smaller_type(first)
        if requested is not None:
            types = first.vgpu_host.all_types
            alike = (gpu for gpu, carrier in kernel.vfs.carriers.items() if carrier.vgpu_host.all_types == types)
            resources = frozenset(f"nvidia.com/{from_type(spec.name)}" for spec in types)
            return Cast(tuple(sorted(alike)), resources, requested)
    return None


def _smaller_type(carrier: Carrier) -> VgpuTypeSpec | None:
    """Return the largest type of which a GPU carries more than of the default's, also in mixed-size mode.

    The type is MIG-backed if the GPU supports MIG. On VFs of vendor VFIO it is time-sliced: these VFs stop listing a
    MIG-backed type once all of its vGPUs exist.
    """
    mig_backed = bool(carrier.vgpu_host.profiles) and carrier.framework is Framework.MDEV
    configs = builtin_configs()
    fitting = (
        spec
        for spec in carrier.vgpu_host.all_types
        if (spec.profile is not None) == mig_backed
        and spec.most >= MORE_THAN_DEFAULT
        and (not spec.places or len(spec.places) >= spec.most)
        and profile_name(spec.name) in configs
    )
    return min(fitting, key=lambda spec: spec.most, default=None)


class VgpuStory(Story):
    """The chapters about vGPUs."""

    def __init__(self, stage: Stage, *, chapter: int = 0) -> None:
        super().__init__(stage, chapter=chapter)
        cast = cast_of(stage.kernel)
        if cast is None:
            raise DemoStuckError(f"no GPU of {stage.host} can carry vGPUs of a type in the catalog")
        self._cast = cast

    async def play_vgpus(self, *, same_host: bool) -> None:
        """Play all chapters; `same_host` tells whether the chapters before had this host."""
        self.say("")
        if same_host:
            self.say("The same host again.")
        else:
            self.open()
        self.say("The agent's settings now have `mode: vgpu`: it creates the vGPUs that the node's label requests.")
        await self.until(lambda: self.agent.host_observed, "the agent's first observation of the host")
        self._label(None)
        await self.until(lambda: self._state() is StateName.SUCCESS, "the vGPUs of the config `default`")
        await self.until(lambda: bool(self._of_vgpus()) and self.all_is_counted(), "the kubelet to count them")
        self.head("Without a label the node has the config `default`", "kubectl describe node node01")
        self.counts("Allocatable", self._allocatable())
        self.head("A VM requests one vGPU")
        pod = await self.kubelet.run_pod("virt-launcher-vm-c", Container("compute", {self._of_vgpus()[0]: 1}))
        self.attachment(pod)
        await self.until(lambda: self.pods_with_devices() == {pod.name}, "the pod's allocation to be known")
        await self._change_label(pod.name)
        self.head("The VM ends")
        self.kubelet.end_pod(pod.name)
        await self.until(lambda: self._has(len(self._cast.gpus)), "the vGPUs of the last GPU")
        await self.until(lambda: self._state() is StateName.SUCCESS, "the agent to report the state")
        self.counts("Allocatable", self._allocatable())
        self.say(self._state_label())

    async def _change_label(self, pod: str) -> None:
        config = self._cast.config
        self.head("The label requests other vGPUs", f"kubectl label node node01 nvidia.com/vgpu.config={config}")
        self._label(config)
        await self.until(lambda: self._has(len(self._cast.gpus) - 1), "the vGPUs of the free GPUs")
        await self.until(lambda: pod in self._state_label(), "the agent to report the state")
        self.say("The agent replaces unused vGPUs. The VM keeps its vGPU, and the node's label reports it:")
        self.counts("Allocatable", self._allocatable())
        self.say(self._state_label(), "yellow")

    def _label(self, config: str | None) -> None:
        self.agent.observations.take_request(NodeRequest(Observed(config), Observed(None)))

    def _has(self, gpus: int) -> bool:
        """Return whether the kubelet counts the requested vGPUs of this number of GPUs."""
        resource = f"nvidia.com/{from_type(self._cast.requested.name)}"
        return self.kubelet.allocatable().get(resource, 0) == gpus * self._cast.requested.most

    def _allocatable(self) -> dict[str, int]:
        return {name: count for name, count in self.kubelet.allocatable().items() if count}

    def _of_vgpus(self) -> list[str]:
        """Return the resources of vGPUs that the kubelet counts."""
        return [name for name in self._allocatable() if name in self._cast.resources]

    def _state(self) -> StateName | None:
        state = self.agent.reports.vgpus.get()
        return state.name if state is not None else None

    def _state_label(self) -> str:
        """Return the node's label of the state, with its annotation."""
        state = self.agent.reports.vgpus.get()
        reason = f": {state.reason}" if state is not None and state.reason else ""
        return f"nvidia.com/vgpu.config.state={state.name if state is not None else 'unknown'}{reason}"

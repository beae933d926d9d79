"""The vGPU part of the demo: a node's label decides which vGPUs its GPUs have, also while a VM uses one of them."""

from dataclasses import dataclass

from gpuvirt.cli.story import DemoStuckError, Stage, Story
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.desired.observed import NodeRequest, Observed, StateName
from gpuvirt.model.desired.vgpudefaults import builtin_configs
from gpuvirt.model.inventory.naming import from_type
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.kubelet import Container
from gpuvirt.sim.vfs import Carrier
from gpuvirt.sim.vgpu import VgpuTypeSpec

MORE_THAN_DEFAULT = 3
"""The config `default` makes two vGPUs on a GPU; the label then asks for at least so many."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What the story is about."""

    gpus: tuple[PciAddress, ...]
    """GPUs of one kind of card, which can carry vGPUs."""
    resources: frozenset[str]
    """Of the types that they know."""
    asked: VgpuTypeSpec
    """The type that the label asks for."""

    @property
    def config(self) -> str:
        """The config of the label."""
        return profile_name(self.asked.name)


def cast_of(kernel: SimKernel) -> Cast | None:
    """Return what can be told of the vGPUs of a simulated host, None where there is nothing to tell."""
    for first in (carrier for _, carrier in sorted(kernel.vfs.carriers.items())):
        asked = _smaller_type(first)
        if asked is not None:
            known = first.vgpu_host.all_types
            alike = (gpu for gpu, carrier in kernel.vfs.carriers.items() if carrier.vgpu_host.all_types == known)
            resources = frozenset(f"nvidia.com/{from_type(spec.name)}" for spec in known)
            return Cast(tuple(sorted(alike)), resources, asked)
    return None


def _smaller_type(carrier: Carrier) -> VgpuTypeSpec | None:
    """Return the largest type of which more fit than of the default's: MIG-backed where the GPU can be cut.

    As many fit in mixed-size mode, so that the GPU may be in either. On VFs of vendor VFIO it is time-sliced: they
    don't name MIG-backed types once all are taken.
    """
    cut = bool(carrier.vgpu_host.profiles) and carrier.framework is Framework.MDEV
    configs = builtin_configs()
    fitting = (
        spec
        for spec in carrier.vgpu_host.all_types
        if (spec.profile is not None) == cut
        and spec.most >= MORE_THAN_DEFAULT
        and (not spec.places or len(spec.places) >= spec.most)
        and profile_name(spec.name) in configs
    )
    return min(fitting, key=lambda spec: spec.most, default=None)


class VgpuStory(Story):
    """One telling."""

    def __init__(self, stage: Stage, *, chapter: int = 0) -> None:
        super().__init__(stage, chapter=chapter)
        cast = cast_of(stage.kernel)
        if cast is None:
            raise DemoStuckError(f"no GPU of {stage.host} can carry vGPUs of a type that the catalog has")
        self._cast = cast

    async def tell_vgpus(self, *, same_host: bool) -> None:
        """Tell all of it; the host may be the one of the story before."""
        self.say("")
        if same_host:
            self.say("The same host again.")
        else:
            self.open()
        self.say("The agent's settings have `mode: vgpu` now: it creates the vGPUs that the node's label asks for.")
        await self.until(lambda: self.agent.looked, "a look at the host")
        self._label(None)
        await self.until(lambda: self._state() is StateName.SUCCESS, "the vGPUs of the config `default`")
        await self.until(self.all_is_counted, "the kubelet to count them")
        self.head("Without a label the node has the config `default`", "kubectl describe node node01")
        self.counts("Allocatable", self._allocatable())
        self.head("A virtual machine asks for one")
        default = next(name for name in self._allocatable() if name in self._cast.resources)
        pod = await self.kubelet.run_pod("virt-launcher-vm-c", Container("compute", {default: 1}))
        self.attachment(pod)
        await self.until(lambda: self.pods_with_devices() == {pod.name}, "the holder to be known")
        await self._ask_for_others(pod.name)
        self.head("The VM ends")
        self.kubelet.end_pod(pod.name)
        await self.until(lambda: self._has(len(self._cast.gpus)), "the vGPUs of the last GPU")
        await self.until(lambda: self._state() is StateName.SUCCESS, "the state to be told")
        self.counts("Allocatable", self._allocatable())
        self.say(self._told())

    async def _ask_for_others(self, pod: str) -> None:
        config = self._cast.config
        self.head("The label asks for others", f"kubectl label node node01 nvidia.com/vgpu.config={config}")
        self._label(config)
        await self.until(lambda: self._has(len(self._cast.gpus) - 1), "the vGPUs of the free GPUs")
        await self.until(lambda: pod in self._told(), "the state to be told")
        self.say("vGPUs that nobody uses are replaced. The VM keeps its own, and the label says so:")
        self.counts("Allocatable", self._allocatable())
        self.say(self._told(), "yellow")

    def _label(self, config: str | None) -> None:
        self.agent.take_request(NodeRequest(Observed(config), Observed(None)))

    def _has(self, gpus: int) -> bool:
        """Return whether the kubelet counts the vGPUs that the label asks for, of so many GPUs."""
        resource = f"nvidia.com/{from_type(self._cast.asked.name)}"
        return self.kubelet.allocatable().get(resource, 0) == gpus * self._cast.asked.most

    def _allocatable(self) -> dict[str, int]:
        return {name: count for name, count in self.kubelet.allocatable().items() if count}

    def _state(self) -> StateName | None:
        told = self.agent.vgpu_states.get()
        return told.name if told is not None else None

    def _told(self) -> str:
        """Return what the node's label says of the state, with its annotation."""
        told = self.agent.vgpu_states.get()
        reason = f": {told.reason}" if told is not None and told.reason else ""
        return f"nvidia.com/vgpu.config.state={told.name if told is not None else 'unknown'}{reason}"

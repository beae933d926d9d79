"""The vGPU part of the demo: a node's label decides which vGPUs its GPUs have, also while a VM uses one of them."""

from gpuvirt.cli.story import Stage, Story
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.heard import Heard, NodeRequest, StateName
from gpuvirt.model.naming import from_type
from gpuvirt.model.profiles import profile_name
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.kubelet import Container
from gpuvirt.sim.vgpu import Carving, VgpuTypeSpec

MORE_THAN_DEFAULT = 3
"""The config `default` makes two vGPUs on a GPU; the label then asks for at least so many."""


def gpus_with_vgpus(kernel: SimKernel) -> tuple[PciAddress, ...]:
    """Return the GPUs of a simulated host that can carry vGPUs."""
    return tuple(sorted(kernel.vfs.carriers))


class VgpuStory(Story):
    """One telling."""

    def __init__(self, stage: Stage, *, chapter: int = 0) -> None:
        super().__init__(stage, chapter=chapter)
        carriers = stage.kernel.vfs.carriers
        self._gpus = len(carriers)
        first = carriers[min(carriers)]
        self._asked = _smaller_type(first.carving, first.framework)

    async def tell_vgpus(self) -> None:
        """Tell all of it."""
        self.say("")
        self.open()
        await self.until(lambda: self.agent.looked, "a look at the host")
        self._label(None)
        await self.until(lambda: self._state() is StateName.SUCCESS, "the vGPUs of the config `default`")
        await self.until(self.all_is_counted, "the kubelet to count them")
        self.head("Without a label the node has the config `default`", "kubectl describe node node01")
        self.counts("Allocatable", self._allocatable())
        self.head("A virtual machine asks for one")
        default = max(self._allocatable().items(), key=lambda one: one[1])[0]
        pod = await self.kubelet.run_pod("virt-launcher-vm-c", Container("compute", {default: 1}))
        self.attachment(pod)
        await self.until(lambda: self.holders() == {pod.name}, "the holder to be known")
        config = profile_name(self._asked.name)
        self.head("The label asks for others", f"kubectl label node node01 nvidia.com/vgpu.config={config}")
        self._label(config)
        await self.until(lambda: self._has(self._gpus - 1), "the vGPUs of the free GPUs")
        await self.until(lambda: pod.name in self._told(), "the state to be told")
        self.say("What is free is withdrawn, removed and made anew. What the VM has stays, and the label says so:")
        self.counts("Allocatable", self._allocatable())
        self.say(self._told(), "yellow")
        self.head("The VM ends")
        self.kubelet.end_pod(pod.name)
        await self.until(lambda: self._has(self._gpus), "the vGPUs of the last GPU")
        await self.until(lambda: self._state() is StateName.SUCCESS, "the state to be told")
        self.counts("Allocatable", self._allocatable())
        self.say(self._told())

    def _label(self, config: str | None) -> None:
        self.agent.hear_wish(NodeRequest(Heard(config), Heard(None)))

    def _has(self, gpus: int) -> bool:
        """Return whether the kubelet counts the vGPUs that the label asks for, of so many GPUs."""
        resource = f"nvidia.com/{from_type(self._asked.name)}"
        return self.kubelet.allocatable().get(resource, 0) == gpus * self._asked.most

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


def _smaller_type(gpu: Carving, framework: Framework) -> VgpuTypeSpec:
    """Return the largest type of which more fit than of the default's: MIG-backed where the GPU can be cut.

    As many fit in mixed-size mode, so that the GPU may be in either. On VFs of vendor VFIO it is time-sliced: they
    don't name MIG-backed types once all are taken.
    """
    cut = bool(gpu.profiles) and framework is Framework.MDEV
    specs = [spec for spec in gpu.all_types if (spec.profile is not None) == cut]
    fitting = [spec for spec in specs if not spec.places or len(spec.places) >= spec.most]
    return min((spec for spec in fitting if spec.most >= MORE_THAN_DEFAULT), key=lambda spec: spec.most)

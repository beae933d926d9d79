"""The second part of the demo: a node's label carves its GPUs into vGPUs, and anew, while a machine has one."""

from gpuvirt.cli.story import Story
from gpuvirt.model.heard import Heard, NodeRequest, StateName
from gpuvirt.sim.kubelet.kubelet import Container

MACHINE = "2xA10-sriov"
WHOLE, QUARTER = "nvidia.com/NVIDIA_A10-12Q", "nvidia.com/NVIDIA_A10-4Q"


class CarvingStory(Story):
    """One telling."""

    async def tell_carving(self) -> None:
        """Tell all of it."""
        self.say("")
        self.open()
        await self.until(lambda: self.agent.looked, "a look at the host")
        self._label(None)
        await self.until(lambda: self._left(WHOLE) == 4, "four vGPUs to be offered")
        self.head("Without a label the node has the config `default`", "kubectl describe node node01")
        self.counts("Allocatable", self._allocatable())
        self.head("A virtual machine asks for one")
        pod = await self.kubelet.run_pod("virt-launcher-vm-c", Container("compute", {WHOLE: 1}))
        self.attachment(pod)
        await self.until(lambda: self.holders() == {pod.name}, "the holder to be known")
        self.head("The label asks for others", "kubectl label node node01 nvidia.com/vgpu.config=A10-4Q")
        self._label("A10-4Q")
        await self.until(lambda: self._left(QUARTER) == 6, "the free GPU to be carved")
        await self.until(lambda: self._state() is StateName.PENDING, "the state to be told")
        self.say("What is free is withdrawn, removed and made anew. What the machine has stays, and the label says so:")
        self.counts("Allocatable", self._allocatable())
        told = self.agent.vgpu_states.get()
        self.say(
            f"nvidia.com/vgpu.config.state={told.name if told else None}: {told.reason if told else None}", "yellow"
        )
        self.head("The machine ends")
        self.kubelet.end_pod(pod.name)
        await self.until(lambda: self._left(QUARTER) == 12, "the rest to be carved")
        await self.until(lambda: self._state() is StateName.SUCCESS, "the state to be told")
        self.counts("Allocatable", self._allocatable())
        self.say("nvidia.com/vgpu.config.state=success")

    def _label(self, config: str | None) -> None:
        self.agent.hear_wish(NodeRequest(Heard(config), Heard(None)))

    def _left(self, resource: str) -> int:
        return self.kubelet.allocatable().get(resource, 0)

    def _allocatable(self) -> dict[str, int]:
        return {name: count for name, count in self.kubelet.allocatable().items() if count}

    def _state(self) -> StateName | None:
        told = self.agent.vgpu_states.get()
        return told.name if told is not None else None

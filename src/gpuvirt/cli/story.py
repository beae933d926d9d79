"""What the demo tells: found, offered, given, failed, recovered, restarted; each step shown as it really happened."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from gpuvirt.cli import render
from gpuvirt.cli.hostdev import Form, mdev_hostdev, pci_hostdev
from gpuvirt.cli.tables import console, say
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.offers.view import NodeView, ResourceView
from gpuvirt.node.agent import Agent
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.kubelet import Container, Pod, SimKubelet

PATIENCE_S = 15.0
POLL_S = 0.05
MOST_COLUMNS = 100
"""Of the frame around what a host is."""
MDEV_PREFIX = "MDEV_PCI_RESOURCE_"
MANAGED = {
    Form.KUBEVIRT_1_9: ", which leaves binding to vfio-pci to the node",
    Form.KUBEVIRT_0_54: ", in which libvirt bound the device itself",
}


class DemoStuckError(GpuvirtError):
    """Something that the demo waits for does not happen."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a story plays: a simulated host and kubelet, and the real agent between them."""

    host: str
    about: str
    kernel: SimKernel
    kubelet: SimKubelet
    agent: Agent
    clock: Clock


class Story:
    """One telling."""

    def __init__(self, stage: Stage, *, chapter: int = 0) -> None:
        """`chapter` is the number of the last one before."""
        self.chapter = chapter
        self.kubelet = stage.kubelet
        self.agent = stage.agent
        self._stage = stage
        self._kernel = stage.kernel
        self._clock = stage.clock
        self._out: Console = console()

    @property
    def _view(self) -> NodeView:
        return self.agent.views.get()

    async def tell(self, *, more: bool = False) -> None:
        """Tell all of it; there may be `more` after it."""
        self.open()
        await self.until(lambda: self.agent.looked, "a look at the host")
        await self.until(self.all_is_counted, "the kubelet to count what is offered")
        self._found()
        if not self._view.resources:
            none = "Nothing is offered yet" if more else "Nothing can be offered on this host"
            self.say("")
            self.say(f"{none}. The lines above say why, and what to do about it.")
            return
        self._offered()
        resource = max(self._view.resources, key=lambda one: len(one.devices))
        await self._one(resource)
        pod = await self._two(resource)
        await self._failure(resource, pod)
        await self._restart(resource, pod)

    def open(self) -> None:
        """Say which machine this is."""
        self._out.print(
            Panel(
                Text.assemble(
                    *("Host ", (self._stage.host, "bold"), f": {self._stage.about}.\n"),
                    "Host and kubelet are simulated; the agent between them is the one that runs on a real node.",
                ),
                width=min(shutil.get_terminal_size().columns, MOST_COLUMNS),
            )
        )

    def all_is_counted(self) -> bool:
        """Tell whether the kubelet has read the lists; a resource is registered some time before that."""
        healthy = {one.name: sum(device.healthy for device in one.devices) for one in self._view.resources}
        return self.kubelet.allocatable() == healthy

    def _found(self) -> None:
        self.head("What is found on the host", "gpuvirt devices")
        render.devices_table(self._view.gpus).print(self._out)
        for reason in render.reasons_shown(self._view):
            render.say_reason(self._out, reason, style="dim")

    def _offered(self) -> None:
        self.head("What the node offers to the cluster", "kubectl describe node node01")
        self.counts("Capacity", self.kubelet.capacity())
        self.counts("Allocatable", self.kubelet.allocatable())

    async def _one(self, resource: ResourceView) -> None:
        self.head("A virtual machine asks for one")
        gpu = f"devices:\n  gpus:\n  - deviceName: {resource.name}\n    name: gpu0"
        self._out.print(Syntax(gpu, "yaml", background_color="default"))
        pod = await self._run_pod("vm-a", resource, 1)
        self.attachment(pod)
        self.say("from which KubeVirt makes the device of the machine (libvirt):")
        for form, text in self._hostdevs(pod):
            self.say(f"KubeVirt {form}{MANAGED[form]}:", style="dim")
            self._out.print(Syntax(text, "xml", background_color="default"))
        self.say("The machine ends, and its device is free again.")
        self.kubelet.end_pod("virt-launcher-vm-a")

    async def _two(self, resource: ResourceView) -> Pod:
        count = min(2, len(resource.devices))
        self.head(f"A virtual machine asks for {'two' if count == 2 else 'the only one'}")
        pod = await self._run_pod("vm-b", resource, count)
        self.attachment(pod)
        return pod

    async def _failure(self, resource: ResourceView, pod: Pod) -> None:
        self.head("A GPU fails, and recovers")
        held = {device for one in pod.held for device in one.devices}
        victim = next((device for device in resource.devices if device.id not in held), resource.devices[0])
        before = self.kubelet.allocatable()[resource.name]
        self.say(f"{victim.gpu} stops answering on the PCI bus. Nobody tells; the agent sees it at its next look:")
        self._kernel.fall_off_bus(PciAddress(victim.gpu))
        await self.until(lambda: self.kubelet.allocatable()[resource.name] < before, "the failure to be seen")
        self.counts("Allocatable", self.kubelet.allocatable())
        shown = next(one for one in self._view.resources if one.name == resource.name)
        reason = next(reason for device in shown.devices for reason in device.reasons)
        render.say_reason(self._out, reason, style="yellow")
        self.say("It answers again:")
        self._kernel.fall_off_bus(PciAddress(victim.gpu), fallen=False)
        await self.until(lambda: self.kubelet.allocatable()[resource.name] == before, "the recovery to be seen")
        self.counts("Allocatable", self.kubelet.allocatable())

    async def _restart(self, resource: ResourceView, pod: Pod) -> None:
        self.head("The kubelet restarts")
        before = dict(self.kubelet.capacity())
        await self.kubelet.stop()
        await self.kubelet.start()
        self.say("It has deleted the sockets of all plugins, and counts nothing until they are back:")
        self.counts("Capacity", self.kubelet.capacity())
        await self.until(lambda: self.kubelet.capacity() == before, "everything to be back")
        self.say("The agent has seen the new kubelet and registered again:")
        self.counts("Capacity", self.kubelet.capacity())
        await self.until(lambda: self._holder(resource, pod) is not None, "the holder to be known")
        self.say(f"{self._holder(resource, pod)} has what it had. No device was touched in all this:")
        self.say(f"writes to the host: {len(self._kernel.writes)}")

    def next(self) -> None:
        """Say what to try now."""
        other = "8xH100" if self._stage.host != "8xH100" else "4xRTX2060"
        self.head("What to try next")
        folder = Path(sys.executable).parent
        on_path = shutil.which("gpuvirt") is not None
        for command, what in (
            *(() if on_path else ((f"export PATH={folder}:$PATH", "so that gpuvirt is found in this shell"),)),
            (f"make demo HOST={other}", "the same on another host; gpuvirt sim hosts lists all"),
            ("gpuvirt sim run -H 4xT4 -- gpuvirt devices", "any command on a simulated host"),
            ("gpuvirt sim run -H 2xA30 -- nvidia-smi mig -lgip", "its own nvidia-smi and sriov-manage, too"),
            ("gpuvirt devices", "the GPUs of this host"),
            ("kubectl apply -f deploy/node.yaml", "the agent on the nodes of a cluster"),
        ):
            self._out.print(Text.assemble("  ", (command, "bold")), soft_wrap=True)
            self._out.print(f"      {what}", style="dim")

    async def _run_pod(self, vm: str, resource: ResourceView, count: int) -> Pod:
        return await self.kubelet.run_pod(f"virt-launcher-{vm}", Container("compute", {resource.name: count}))

    def attachment(self, pod: Pod) -> None:
        """Show what a pod got."""
        self.say(f"and pod {pod.name} gets")
        for name, value in pod.env().items():
            self._out.print(Text.assemble(f"  {name}=", (value, "bold")), soft_wrap=True)
        self._out.print(f"  {' '.join(pod.device_nodes())}", soft_wrap=True)

    def _hostdevs(self, pod: Pod) -> list[tuple[Form, str]]:
        (name, value), *_ = pod.env().items()
        device = value.split(",")[0]
        if name.startswith(MDEV_PREFIX):
            return [(Form.KUBEVIRT_1_9, mdev_hostdev(VgpuId(device), "gpu0", display=True))]
        return [(form, pci_hostdev(PciAddress(device), "gpu0", form)) for form in Form]

    def pods_with_devices(self) -> set[str]:
        """Return the pods that have something, by their names."""
        found = (device.allocated_to for one in self._view.resources for device in one.devices)
        return {allocated_to.rpartition("/")[2] for allocated_to in found if allocated_to is not None}

    def _holder(self, resource: ResourceView, pod: Pod) -> str | None:
        """Return the holder of a pod's device as the agent's view names it."""
        shown = next((one for one in self._view.resources if one.name == resource.name), None)
        devices = shown.devices if shown is not None else ()
        return next((one.allocated_to for one in devices if one.allocated_to and pod.name in one.allocated_to), None)

    def counts(self, title: str, counts: Mapping[str, int]) -> None:
        """Show how many there are of each."""
        self._out.print(f"{title}:")
        for name, count in counts.items():
            self._out.print(Text.assemble(f"  {name + ':':<48} ", (str(count), "bold")))

    def head(self, title: str, command: str | None = None) -> None:
        """Begin a chapter."""
        self.chapter += 1
        self._out.print(f"\n{self.chapter}. {title}", style="bold green")
        if command is not None:
            self._out.print(f"$ {command}", style="dim")

    def say(self, text: str, style: str = "") -> None:
        """Say something."""
        say(self._out, text, style=style)

    async def until(self, met: Callable[[], bool], what: str) -> None:
        """Wait until something has come true."""
        deadline_s = self._clock.monotonic_s() + PATIENCE_S
        while not met():
            if self._clock.monotonic_s() > deadline_s:
                raise DemoStuckError(f"the demo waited {PATIENCE_S:g} s for {what}, which should take less than one")
            await self._clock.sleep(POLL_S)

"""The chapters of the demo: the real agent discovers, offers and allocates GPUs, and observes failures and restarts."""

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from gpuvirt.agent.agent import Agent
from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import console, say
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.offers.view import NodeView, ResourceView
from gpuvirt_sim.commands.hostdev import Form, mdev_hostdev, pci_hostdev
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet

PATIENCE_S = 15.0
POLL_S = 0.05
MOST_COLUMNS = 100
"""The width of the panel that describes the host, at most."""
MDEV_PREFIX = "MDEV_PCI_RESOURCE_"
MANAGED = {
    Form.KUBEVIRT_1_9: ", where the node binds the GPU to vfio-pci",
    Form.KUBEVIRT_0_54: ", where libvirt binds the GPU to vfio-pci",
}


class DemoStuckError(GpuvirtError):
    """An event that the demo waits for does not happen."""


class Stage(msgspec.Struct, frozen=True):
    """The simulated host and kubelet of a story, and the real agent between them."""

    host: str
    about: str
    kernel: SimKernel
    kubelet: SimKubelet
    agent: Agent
    clock: Clock


class Story:
    """The chapters about GPUs, most of them about whole GPUs."""

    def __init__(self, stage: Stage, *, chapter: int = 0) -> None:
        """`chapter` is the number of the last chapter that was printed."""
        self.chapter = chapter
        self.kubelet = stage.kubelet
        self.agent = stage.agent
        self._stage = stage
        self._kernel = stage.kernel
        self._clock = stage.clock
        self.out: Console = console()

    @property
    def _view(self) -> NodeView:
        return self.agent.views.get()

    def follow(self, other: "Story") -> None:
        """Continue after the chapters of another story."""
        self.chapter = other.chapter

    async def play(self, *, more: bool = False) -> None:
        """Play all chapters; `more` tells whether chapters about vGPUs on the same host follow."""
        self.open()
        await self.until(lambda: self.agent.host_observed, "the agent's first observation of the host")
        await self.until(self.all_is_counted, "the kubelet to count the offered devices")
        self._found()
        if not self._view.resources:
            none = "Nothing is offered yet" if more else "Nothing can be offered on this host"
            self.say("")
            self.say(f"{none}. The reasons above have the cause and the fix.")
            return
        self._offered()
        resource = max(self._view.resources, key=lambda resource: len(resource.devices))
        await self._first_vm(resource)
        pod = await self._second_vm(resource)
        await self._failure(resource, pod)
        await self._restart(resource, pod)

    def open(self) -> None:
        """Describe the host."""
        self.out.print(
            Panel(
                Text.assemble(
                    *("Host ", (self._stage.host, "bold"), f": {self._stage.about}.\n"),
                    "Host and kubelet are simulated; the agent between them is the one that runs on a real node.",
                ),
                width=min(shutil.get_terminal_size().columns, MOST_COLUMNS),
            )
        )

    def all_is_counted(self) -> bool:
        """Tell whether the kubelet has read the lists, which it does some time after the registration."""
        resources = self._view.resources
        healthy = {resource.name: sum(device.healthy for device in resource.devices) for resource in resources}
        return self.kubelet.allocatable() == healthy

    def _found(self) -> None:
        self.head("The agent finds the GPUs of the host", "gpuvirt devices")
        render.devices_table(self._view.gpus).print(self.out)
        for reason in render.reasons_shown(self._view):
            render.say_reason(self.out, reason, style="dim")

    def _offered(self) -> None:
        self.head("The node offers them to the cluster", "kubectl describe node node01")
        self.counts("Capacity", self.kubelet.capacity())
        self.counts("Allocatable", self.kubelet.allocatable())

    async def _first_vm(self, resource: ResourceView) -> None:
        self.head("A VM requests one GPU")
        gpu = f"devices:\n  gpus:\n  - deviceName: {resource.name}\n    name: gpu0"
        self.out.print(Syntax(gpu, "yaml", background_color="default"))
        pod = await self._run_pod("vm-a", resource, 1)
        self.attachment(pod)
        self.say("KubeVirt turns this into a device of the VM's libvirt domain:")
        for form, text in self._hostdevs(pod):
            self.say(f"KubeVirt {form}{MANAGED[form]}:", style="dim")
            self.out.print(Syntax(text, "xml", background_color="default"))
        self.say("The VM ends, and its device is free again.")
        self.kubelet.end_pod("virt-launcher-vm-a")

    async def _second_vm(self, resource: ResourceView) -> Pod:
        count = min(2, len(resource.devices))
        self.head(f"A VM requests {'two GPUs' if count == 2 else 'the only GPU'}")
        pod = await self._run_pod("vm-b", resource, count)
        self.attachment(pod)
        return pod

    async def _failure(self, resource: ResourceView, pod: Pod) -> None:
        self.head("A GPU fails, and recovers")
        allocated = {device for allocation in pod.held for device in allocation.devices}
        failing = next((device for device in resource.devices if device.id not in allocated), resource.devices[0])
        before = self.kubelet.allocatable()[resource.name]
        if (gpu := failing.gpu) is None:
            return
        self.say(f"{gpu} stops answering on the PCI bus. The agent detects it at its next observation:")
        self._kernel.fall_off_bus(gpu)
        await self.until(lambda: self.kubelet.allocatable()[resource.name] < before, "the kubelet to count one less")
        self.counts("Allocatable", self.kubelet.allocatable())
        shown = next(shown for shown in self._view.resources if shown.name == resource.name)
        reason = next(reason for device in shown.devices for reason in device.reasons)
        render.say_reason(self.out, reason, style="yellow")
        self.say("The GPU answers again:")
        self._kernel.fall_off_bus(gpu, fallen=False)
        await self.until(lambda: self.kubelet.allocatable()[resource.name] == before, "the kubelet to count it again")
        self.counts("Allocatable", self.kubelet.allocatable())

    async def _restart(self, resource: ResourceView, pod: Pod) -> None:
        self.head("The kubelet restarts")
        before = dict(self.kubelet.capacity())
        await self.kubelet.stop()
        await self.kubelet.start()
        self.say("The kubelet has deleted the sockets of all device plugins, and counts no device until they are back:")
        self.counts("Capacity", self.kubelet.capacity())
        await self.until(lambda: self.kubelet.capacity() == before, "the kubelet to count all devices again")
        self.say("The agent has detected the new kubelet and registered again:")
        self.counts("Capacity", self.kubelet.capacity())
        await self.until(lambda: self._allocated_to(resource, pod) is not None, "the pod's allocations to be known")
        self.say(f"{self._allocated_to(resource, pod)} still has its devices. The agent has changed no device so far:")
        self.say(f"writes to the host: {len(self._kernel.writes)}")

    def suggest(self) -> None:
        """Print commands to try next."""
        other = "8xH100" if self._stage.host != "8xH100" else "4xRTX2060"
        self.head("What to try next")
        folder = Path(sys.executable).parent
        on_path = shutil.which("gpuvirt") is not None
        for command, what in (
            *(() if on_path else ((f"export PATH={folder}:$PATH", "makes gpuvirt available in this shell"),)),
            (f"make demo HOST={other}", "plays the demo on another host; gpuvirt sim hosts lists all hosts"),
            ("gpuvirt sim run -H 4xT4 -- gpuvirt devices", "runs any command on a simulated host"),
            ("gpuvirt sim run -H 2xA30 -- nvidia-smi mig -lgip", "runs the simulated nvidia-smi"),
            ("gpuvirt devices", "lists the GPUs of this host"),
            ("kubectl apply -f deploy/node.yaml", "runs the agent on the nodes of a cluster"),
        ):
            self.out.print(Text.assemble("  ", (command, "bold")), soft_wrap=True)
            self.out.print(f"      {what}", style="dim")

    async def _run_pod(self, vm: str, resource: ResourceView, count: int) -> Pod:
        return await self.kubelet.run_pod(f"virt-launcher-{vm}", Container("compute", {resource.name: count}))

    def attachment(self, pod: Pod) -> None:
        """Show the environment and the device nodes that a pod got."""
        self.say(f"Its pod {pod.name} gets:")
        for name, value in pod.env().items():
            self.out.print(Text.assemble(f"  {name}=", (value, "bold")), soft_wrap=True)
        self.out.print(f"  {' '.join(pod.device_nodes())}", soft_wrap=True)

    def _hostdevs(self, pod: Pod) -> list[tuple[Form, str]]:
        (name, value), *_ = pod.env().items()
        device = value.split(",")[0]
        if name.startswith(MDEV_PREFIX):
            return [(Form.KUBEVIRT_1_9, mdev_hostdev(VgpuId(device), "gpu0"))]
        return [(form, pci_hostdev(PciAddress(device), "gpu0", form)) for form in Form]

    def pods_with_devices(self) -> set[str]:
        """Return the names of the pods that have devices."""
        found = (device.allocated_to for resource in self._view.resources for device in resource.devices)
        return {allocated_to.rpartition("/")[2] for allocated_to in found if allocated_to is not None}

    def _allocated_to(self, resource: ResourceView, pod: Pod) -> str | None:
        """Return the agent's name of a pod that has a device of a resource, None if the agent knows no such device."""
        shown = next((shown for shown in self._view.resources if shown.name == resource.name), None)
        names = (device.allocated_to for device in (shown.devices if shown is not None else ()))
        return next((name for name in names if name is not None and pod.name in name), None)

    def counts(self, title: str, counts: Mapping[str, int]) -> None:
        """Show the number of devices of each resource."""
        self.out.print(f"{title}:")
        for name, count in counts.items():
            self.out.print(Text.assemble(f"  {name + ':':<48} ", (str(count), "bold")))

    def head(self, title: str, command: str | None = None) -> None:
        """Begin a chapter."""
        self.chapter += 1
        self.out.print(f"\n{self.chapter}. {title}", style="bold green")
        if command is not None:
            self.out.print(f"$ {command}", style="dim")

    def say(self, text: str, style: str = "") -> None:
        """Print a paragraph."""
        say(self.out, text, style=style)

    async def until(self, met: Callable[[], bool], what: str) -> None:
        """Wait until a condition is met; raise DemoStuckError after some seconds."""
        deadline_s = self._clock.monotonic_s() + PATIENCE_S
        while not met():
            if self._clock.monotonic_s() > deadline_s:
                raise DemoStuckError(f"the demo waited {PATIENCE_S:g} s for {what}, which should take less than one")
            await self._clock.sleep(POLL_S)

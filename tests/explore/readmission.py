"""Pods from before a reboot, in exploration: the kubelet admits them again, and starts their containers again.

It does so by its record. It calls no Allocate, and its record has the nodes that the devices had before the reboot. It
refuses a pod with an unhealthy device for good, and asks the plugin by PreStartContainer before each start.
"""

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.vfio import CDEVS, Group, group_of_node
from gpuvirt_sim.kernel import SimKernel
from tests.explore.agenda import Option
from tests.explore.kubelet import Pod
from tests.explore.observer import Observer, ViolationError
from tests.explore.scheduler import KilledError, Process

if TYPE_CHECKING:
    from tests.explore.agents import Running
    from tests.explore.world import World

BACK_OFF_S = 10.0
"""The kubelet's pause before it tries again to start a container."""


def groups_behind(kernel: SimKernel, nodes: Iterable[str]) -> frozenset[int]:
    """Return the groups of the devices that nodes belong to now: VFIO's nodes of groups, and those of devices."""
    numbers = (group_of_node(node) for node in nodes)
    names = {node.rpartition("/")[2] for node in nodes if node.startswith(f"{CDEVS}/")}
    by_devices = {
        group.number
        for group in (kernel.vfio.groups.values() if names else ())
        for folder in group.vfio_devices.values()
        if any(kernel.tree.exists(HostPath(f"{folder}/vfio-dev/{name}")) for name in names)
    }
    return frozenset({*(number for number in numbers if number is not None), *by_devices})


def verify_nodes(observer: Observer, kernel: SimKernel, pod: Pod, devices: Iterable[str]) -> None:
    """Assert that a container that starts has all its devices, and no node of another device."""
    own: set[int] = set()
    for device in devices:
        if (group := _group_with(kernel, device)) is None:
            observer.violated("not there", f"{pod.name} starts with {device}, which no VM could use")
        else:
            own.add(group.number)
    if foreign := groups_behind(kernel, pod.nodes) - own:
        words = ", ".join(str(number) for number in sorted(foreign))
        observer.violated("another's node", f"{pod.name} starts with a node of group {words}, and has {sorted(own)}")


def _group_with(kernel: SimKernel, device: str) -> Group | None:
    """Return the group in which a device is a VFIO device, None where it is none."""
    function, mdev = kernel.pci.functions.get(PciAddress(device)), kernel.mdev.devices.get(device)
    number = mdev.group if mdev is not None else function.group if function is not None else None
    group = kernel.vfio.groups.get(IommuGroup(number)) if number is not None else None
    return group if group is not None and device in group.vfio_devices else None


class Readmission:
    """The kubelet's work after a reboot, with pods that had their devices before."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._stopped: set[str] = set()
        """The pods with devices of gpuvirt, but on-demand ones, whose containers have yet to start again."""
        self._pausing: set[str] = set()
        """Those of them that were refused a moment ago."""
        self._unrecorded: set[str] = set()
        """Those whose allocation the ledger lost with the host's power: it is written a moment after the answer."""
        self._asked: dict[str, Process] = {}
        """The agents that were asked for the starts of pods, and have not answered."""

    def reboot(self) -> None:
        """End all VMs of pods; the disk has what was synced."""
        path = self._world.disk.folder / "state/ledger.json"
        ledger = path.read_text() if path.exists() else ""
        for pod in self._world.kubelet.pods.values():
            if not (pod.vgpus or pod.by_other or pod.is_sharer or pod.is_claimer):
                self._world.processes.pop(pod.name, None)
                pod.started, pod.rebooted = False, True
                self._stopped.add(pod.name)
                if any(str(device) not in ledger for _, device in pod.keys):
                    self._unrecorded.add(pod.name)

    def possible_events(self) -> Iterator[Option]:
        """Yield the admissions and starts that are possible."""
        serving, kubelet = self._world.agents.serving, self._world.kubelet
        if serving is None or not (kubelet.up and kubelet.has_pods):
            return
        for pod in (pod for pod in kubelet.pods.values() if not _is_over(pod)):
            if pod.readmits:
                if all(resource in kubelet.lists for resource, _ in pod.keys):
                    readmit = partial(self._readmit, pod)
                    yield Option(f"the kubelet admits {pod.name} again", readmit, ("again", pod.name))
            elif self._may_start(pod):
                start = partial(self._start, pod, serving)
                yield Option(f"the kubelet starts {pod.name} again", start, ("start", pod.name))

    def _may_start(self, pod: Pod) -> bool:
        asked = self._asked.get(pod.name)
        is_asked = asked is not None and not asked.dead
        return pod.known and pod.name in self._stopped - self._pausing and not is_asked

    def _readmit(self, pod: Pod) -> None:
        """Admit a pod again after a start of the kubelet: it calls no Allocate, and refuses unhealthy devices.

        Before plugins have registered the kubelet refuses each such pod, whatever they do: this one waits. A pod whose
        only container runs is not checked (devicesToAllocate). One that does not run may be refused where its GPU is
        wanted for something else.
        """
        pod.readmits = False
        lists = self._world.kubelet.lists
        if pod.started and len(pod.containers) == 1:
            return
        for resource, device in pod.keys:
            if lists.get(resource, {}).get(device, False):
                continue
            is_kept = self._is_still_desired(str(device)) and pod.name not in self._unrecorded
            if pod.vgpus or is_kept:
                raise ViolationError("refused again", f"{pod.name}: {device} of {resource} is not healthy")
            self._world.scheduler.add_line(f"  {pod.name} is refused: {device} is not healthy")
            self._world.kubelet.end(pod)
            return

    def _start(self, pod: Pod, running: "Running") -> None:
        self._asked[pod.name] = running.process
        self._starting = running.loop.create_task(self._call(pod, running))

    async def _call(self, pod: Pod, running: "Running") -> None:
        world, devices = self._world, [DeviceId(device) for _, device in pod.keys]
        try:
            await running.agent.allocators.pre_start(pod.keys[0][0], devices)
        except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
            world.scheduler.add_line(f"  {pod.name} does not start: {error}")
            self._pause(pod)
            return
        finally:
            self._asked.pop(pod.name, None)
        if not _is_over(pod):
            self._start_container(pod)

    def _start_container(self, pod: Pod) -> None:
        """Start a container with the recorded nodes; the runtime fails where one of them is not there."""
        world = self._world
        verify_nodes(world.observer, world.kernel, pod, (str(device) for _, device in pod.keys))
        if not self._has_nodes(pod):
            self._pause(pod)
            return
        self._stopped.discard(pod.name)
        pod.groups, pod.started = groups_behind(world.kernel, pod.nodes), True
        world.observer.verify_unshared(pod)
        world.scheduler.add_line(f"  {pod.name} starts again with {', '.join(pod.nodes)}")

    def _has_nodes(self, pod: Pod) -> bool:
        tree = self._world.kernel.tree
        return all(tree.exists(HostPath(node)) for node in pod.nodes)

    def _pause(self, pod: Pod) -> None:
        """Have the kubelet try again after its back-off."""
        self._pausing.add(pod.name)
        self._world.clock.call_later(BACK_OFF_S, partial(self._pausing.discard, pod.name))

    def find_fault(self) -> ViolationError | None:
        """Return a pod that never starts again, in a world at rest, though its devices have the recorded nodes."""
        world = self._world
        if not world.kubelet.up or world.kubelet.unreadable or world.agents.serving is not world.agents.running:
            return None
        if world.kernel.faults.refusals or world.refusing is not None or not world.kubelet.has_pods:
            return None
        for pod in world.kubelet.pods.values():
            is_kept = pod.name in self._stopped - self._unrecorded and pod.known and not _is_over(pod)
            if is_kept and self._could_start(pod):
                return ViolationError("lost", f"{pod.name} never starts again with {', '.join(pod.nodes)}")
        return None

    def _could_start(self, pod: Pod) -> bool:
        """Return whether a pod's devices are there by the recorded nodes, or should be: its GPU is for VMs."""
        kernel = self._world.kernel
        groups = {device: _group_with(kernel, str(device)) for _, device in pod.keys}
        if any(group is None for group in groups.values()):
            return all(self._is_still_desired(str(device)) for device, group in groups.items() if group is None)
        own = {group.number for group in groups.values() if group is not None}
        return self._has_nodes(pod) and groups_behind(kernel, pod.nodes) == own

    def _is_still_desired(self, device: str) -> bool:
        """Return whether the desired state still has a device: a whole GPU, or a vGPU of the first config."""
        spec, address = self._world.spec, PciAddress(device)
        if address in self._world.kernel.pci.functions:
            return spec.gpus.get(address, spec.mode) == "passthrough"
        return spec == self._world.scenario.spec


def _is_over(pod: Pod) -> bool:
    return pod.deleted or pod.ended or pod.forgotten

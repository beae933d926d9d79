"""Pods on a simulated node that request on-demand vGPUs: the test acts as the kubelet, with its ids and its record."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.ondemand.ondemandallocator import ALLOCATE_S
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.facts.nodes import unread_node
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, at_once

ON_DEMAND = Settings(mode=DesiredMode.ON_DEMAND)
P100 = "0000:3b:00.0"
GPU = PciAddress(P100)
V8Q = ResourceName("tencent.com/vgpu-86")
NO_TIME = datetime(2026, 1, 1, tzinfo=UTC)


def one_p100() -> SimKernel:
    """Return a host with one GPU and six types of vGPUs, as in Tencent's document."""
    slots = (SlotSpec(at=P100, board="P100", group=31, numa=0),)
    return build_host(HostSpec(about="one P100", slots=slots))


def counts(node: SimNode) -> Mapping[str, int]:
    """Return what the kubelet counts of each resource: the listed ids."""
    return {
        resource.name.rpartition("/")[2]: len(resource.devices)
        for resource in node.view.resources
        if resource.on_demand is not None
    }


def vgpus(node: SimNode) -> list[str]:
    """Return the vGPUs of the host, as the kernel lists them."""
    return sorted(node.kernel.listdir(MDEVS))


async def settled(node: SimNode) -> None:
    """Let the agent observe, ask the kubelet, and act, until nothing is left to do."""
    for _ in range(8):
        await node.report_account()
        await node.advance(1.0)


def _recorded(answer: Attachment) -> PluginAnswer:
    """Return an answer as the agent reads it from the kubelet's checkpoint."""
    return PluginAnswer(tuple(map(unread_node, answer.device_nodes)), tuple(answer.env.items()))


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that was admitted."""

    name: str
    resource: str
    devices: tuple[str, ...]
    answer: Attachment

    @property
    def vgpus(self) -> list[str]:
        """The vGPUs that its VM opens."""
        return [vgpu for value in self.answer.env.values() for vgpu in value.split(",")]


class Pods:
    """The pods of one node."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def free(self, resource: str) -> list[str]:
        """Return the listed ids that no pod has."""
        held = {device for _, device in self._node.held}
        found = next(view for view in self._node.view.resources if view.name == resource)
        return [device.id for device in found.devices if device.id not in held]

    def admit(self, name: str, resource: str, *devices: str) -> Pod:
        """Allocate ids, any free one without `devices`, and record the answer; raise AllocationRefusedError."""
        devices = devices or (self.free(resource)[0],)
        (answer,) = self._node.allocate(resource, devices)
        self._node.write(resource, *devices, uid=f"uid-of-{name}", answer=_recorded(answer))
        return Pod(name, resource, devices, answer)

    def start(self, name: str, resource: str, *devices: str) -> Pod:
        """Admit a pod and start its container."""
        pod = self.admit(name, resource, *devices)
        self.pre_start(pod)
        self._node.hold(resource, *pod.devices, pod=name, answer=_recorded(pod.answer))
        return pod

    def pre_start(self, pod: Pod) -> None:
        """Ask before a container of a pod starts; raise AllocationRefusedError."""
        ids = [DeviceId(device) for device in pod.devices]
        at_once(self._node.agent.allocators.pre_start(ResourceName(pod.resource), ids))

    def end(self, pod: Pod) -> None:
        """Let the kubelet free a pod's ids."""
        self._node.free(*pod.devices)

    async def refusal(self, resource: str, devices: Sequence[str]) -> str:
        """Return why a request is refused, which may take a moment."""
        text, _ = await self.refused(resource, devices)
        return text

    async def refused(self, resource: str, devices: Sequence[str]) -> tuple[str, float]:
        """Return why a request is refused, and after how many seconds."""
        request = AllocationRequest(ResourceName(resource), [[DeviceId(device) for device in devices]])
        refusals: list[tuple[str, float]] = []
        began_s = self._node.clock.monotonic_s()

        async def ask() -> None:
            try:
                await self._node.agent.allocators.allocate(request)
            except AllocationRefusedError as error:
                refusals.append((error.reason.text, self._node.clock.monotonic_s() - began_s))

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            await self._node.advance(ALLOCATE_S + 1.0)
        (refused,) = refusals
        return refused

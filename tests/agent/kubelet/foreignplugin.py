"""Device plugins of other projects, as the kubelet sees them: KubeVirt's names devices by groups, NVIDIA's by UUIDs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from typing_extensions import override

from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.kubelet.plugins import DevicePlugin
from gpuvirt.agent.kubelet.registrar import register
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.offers.view import DeviceView, ResourceView
from gpuvirt.paths import HostPath, KubeletPaths
from tests.agent.kubelet.givingkubelet import OpenAllocator

GROUPS = ("12", "22")


class GroupAllocator(OpenAllocator):
    """Answers Allocate as KubeVirt's plugin does, with the nodes of groups, and records the devices."""

    def __init__(self) -> None:
        self.allocated: list[Sequence[DeviceId]] = []
        self.asked = threading.Event()
        self.answers = threading.Event()
        """Set while the plugin answers."""
        self.answers.set()
        self.failing = False

    @override
    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        self.asked.set()
        while not self.answers.is_set():
            await RealClock().sleep(0.01)
        if self.failing:
            raise RuntimeError
        self.allocated += request.containers
        return tuple(Attachment({}, _nodes(ids)) for ids in request.containers)


def _nodes(ids: Sequence[DeviceId]) -> tuple[HostPath, ...]:
    groups = [HostPath(f"/dev/vfio/{device}") for device in ids if device.isdigit()]
    return (HostPath("/dev/vfio/vfio"), *groups) if groups else ()


@asynccontextmanager
async def kubevirt_offers(
    folder: Path, resource: ResourceName, ids: Sequence[str] = GROUPS
) -> AsyncIterator[GroupAllocator]:
    """Let a plugin offer `ids` as a resource, as soon as the kubelet in `folder` accepts registrations."""
    devices = tuple(DeviceView(DeviceId(device_id), True, None, None, PciAddress("0000:65:00.0")) for device_id in ids)
    allocator, paths, clock = GroupAllocator(), KubeletPaths(folder), RealClock()
    path = paths.device_plugins / f"kubevirt-{resource.replace('/', '-')}.sock"
    plugin = DevicePlugin(ResourceView(resource, devices), path, allocator, clock, unknown_numa_is_node_0=False)
    await plugin.start()
    await register(paths, resource, path.name)
    while not plugin.streams:
        await clock.sleep(0.005)
    try:
        yield allocator
    finally:
        await plugin.stop()


@contextmanager
def kubevirt_offers_beside(
    folder: Path, resource: ResourceName, ids: Sequence[str] = GROUPS
) -> Iterator[GroupAllocator]:
    """Run the plugin in a thread, beside tests that wait for programs."""
    ready, over, found = threading.Event(), threading.Event(), list[GroupAllocator]()

    async def offer() -> None:
        async with kubevirt_offers(folder, resource, ids) as allocator:
            found.append(allocator)
            ready.set()
            while not over.is_set():
                await RealClock().sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(offer()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        over.set()
        thread.join()

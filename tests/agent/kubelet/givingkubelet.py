"""A simulated kubelet beside tests that run commands; it has allocated a plugin's devices to a pod."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.kubelet.plugins import DevicePlugin
from gpuvirt.agent.kubelet.registrar import register
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.offers.view import DeviceView, ResourceView
from gpuvirt_sim.kubelet.containers import Claim, Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running


class OpenAllocator:
    """Allocates the requested devices, and lets each container start."""

    def prefer(
        self, _resource: ResourceName, _available: Sequence[DeviceId], _must_include: Sequence[DeviceId], _size: int
    ) -> Sequence[DeviceId]:
        return ()

    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        return tuple(Attachment({}, ()) for _ in request.containers)

    async def pre_start(self, _resource: ResourceName, _devices: Sequence[DeviceId]) -> None:
        pass


async def give(kubelet: SimKubelet, resource: str, devices: Sequence[str]) -> None:
    """Make a kubelet allocate devices of another plugin to the pod default/cuda."""
    name, clock = ResourceName(resource), RealClock()
    views = tuple(DeviceView(DeviceId(device), True, None, None, PciAddress("0000:00:00.0")) for device in devices)
    path = kubelet.paths.device_plugins / "other.sock"
    plugin = DevicePlugin(ResourceView(name, views), path, OpenAllocator(), clock, unknown_numa_is_node_0=False)
    await plugin.start()
    await register(kubelet.paths, name, path.name)
    while kubelet.allocatable().get(resource, 0) < len(devices):
        await clock.sleep(0.005)
    await kubelet.run_pod("cuda", Container("main", {resource: len(devices)}))
    await plugin.stop()


@contextmanager
def kubelet_with_pod(root: Path, resource: str, *devices: str, claims: Sequence[Claim] = ()) -> Iterator[None]:
    """Run a kubelet in `root` that has allocated all `devices` to the pod default/cuda, and `claims` to default/dra."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(root, RealClock()) as kubelet:
            await give(kubelet, resource, devices)
            if claims:
                await kubelet.run_pod("dra", Container("main", {}, claims=claims))
            ready.set()
            while not over.is_set():
                await RealClock().sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        over.set()
        thread.join()

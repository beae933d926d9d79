"""A device that leaves its list while the kubelet asks for it stays in that list until the kubelet has recorded it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.kubelet import pluginserver
from gpuvirt.agent.kubelet.plugins import DevicePlugin
from gpuvirt.agent.kubelet.registrar import register
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.offers.view import DeviceView, ResourceView
from gpuvirt_sim.kubelet.checkpoint import NO_TOPOLOGY
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from tests.agent.kubelet.givingkubelet import OpenAllocator
from tests.agent.kubelet.kubeletnode import CLOCK, until

NAME, DEVICE = ResourceName("nvidia.com/A10"), DeviceId("0000:65:00.0")
OFFERED = ResourceView(NAME, (DeviceView(DEVICE, True, 1, None, PciAddress("0000:65:00.0")),))
WITHDRAWN = ResourceView(NAME, ())


class Leaves(Enum):
    """When the device leaves the list."""

    BEFORE_ITS_ALLOCATE = auto()
    DURING_ITS_ALLOCATE = auto()


class Leaving(OpenAllocator):
    """Answers for a device that is withdrawn meanwhile, once the kubelet has the list without it."""

    def __init__(self, kubelet: SimKubelet, leaves: Leaves) -> None:
        self._kubelet = kubelet
        self._leaves = leaves
        self.plugin: DevicePlugin

    def _withdraw(self, at: Leaves) -> None:
        if self._leaves is at:
            self.plugin.show(WITHDRAWN)

    @override
    def prefer(
        self, _resource: ResourceName, _available: Sequence[DeviceId], _must_include: Sequence[DeviceId], _size: int
    ) -> Sequence[DeviceId]:
        self._withdraw(Leaves.BEFORE_ITS_ALLOCATE)
        return ()

    @override
    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        self._withdraw(Leaves.DURING_ITS_ALLOCATE)
        if self._leaves is Leaves.DURING_ITS_ALLOCATE:
            await until(lambda: not self._kubelet.allocatable()[NAME])
        return await super().allocate(request)


@asynccontextmanager
async def plugin_on(kubelet: SimKubelet, leaves: Leaves) -> AsyncIterator[None]:
    allocator, path = Leaving(kubelet, leaves), kubelet.paths.device_plugins / "ours.sock"
    allocator.plugin = DevicePlugin(OFFERED, path, allocator, CLOCK, unknown_numa_is_node_0=False)
    await allocator.plugin.start()
    await register(kubelet.paths, NAME, path.name)
    await until(lambda: kubelet.allocatable().get(NAME) == 1)
    try:
        yield
    finally:
        await allocator.plugin.stop()


@pytest.mark.parametrize("leaves", Leaves)
async def test_a_device_stays_listed_until_the_kubelet_has_recorded_it(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, leaves: Leaves
) -> None:
    monkeypatch.setattr(pluginserver, "RECORDED_S", 0.3)
    async with running(short_path, CLOCK) as kubelet, plugin_on(kubelet, leaves):
        pod = await kubelet.run_pod("p", Container("main", {NAME: 1}))
        # Of a device that the last list lacked, the NUMA node is not known any more.
        node = "1" if leaves is Leaves.DURING_ITS_ALLOCATE else NO_TOPOLOGY
        assert [dict(held.by_node) for held in pod.held] == [{node: [DEVICE]}]
        await until(lambda: kubelet.capacity()[NAME] == 0)

"""Both allocators of an agent: the one for devices that exist, and the one that creates vGPUs for a pod.

The device plugins ask here: a request goes to the allocator of its ids.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from gpuvirt.agent.allocation.allocator import Allocator, Callbacks
from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.known.kubeletrecord import KubeletRecord
from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.loops.wakes import Wakes
from gpuvirt.agent.loops.watcher import Watcher
from gpuvirt.agent.ondemand.ondemandallocator import OnDemandAllocator, OnDemandParts
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.reconcile.reports import Reports
from gpuvirt.agent.store.persisted import WriteBehind
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ledger import Ledger, SettledAt
from gpuvirt.model.allocation.ondemandids import is_on_demand_id


class AllocatorParts(msgspec.Struct, frozen=True):
    """The parts of an agent that its allocators use."""

    state: NodeState
    options: NodeOptions
    kubelet: KubeletRecord
    gate: AllocationGate
    ledger: WriteBehind[Ledger]
    telemetry: Telemetry
    watcher: Watcher
    wakes: Wakes
    reports: Reports
    publish: Callable[[], None]
    """Shows the new allocation of an on-demand vGPU at once."""


def _on_demand(parts: AllocatorParts) -> OnDemandAllocator | None:
    if parts.options.change_host is None:
        return None
    return OnDemandAllocator(
        OnDemandParts(
            parts.state,
            parts.options,
            parts.kubelet,
            parts.options.change_host,
            parts.gate,
            parts.telemetry,
            parts.ledger,
            parts.publish,
            partial(parts.watcher.observe_soon, "creation"),
            parts.wakes.room,
        )
    )


class Allocators:
    """Prefers and allocates devices, and lets containers start with them."""

    def __init__(self, parts: AllocatorParts) -> None:
        self._state = parts.state
        self._clock = parts.options.clock
        refused, unseen = partial(parts.watcher.observe_soon, "refusal"), partial(parts.reports.problem, "users")
        callbacks = Callbacks(parts.wakes.allocated, refused, unseen)
        self.existing = Allocator(parts.state, parts.options, parts.kubelet, parts.telemetry, callbacks, parts.gate)
        """Allocates GPUs and vGPUs that exist."""
        self.on_demand = _on_demand(parts)
        """Allocates vGPUs that are created for a pod; None for an agent that changes no GPUs."""

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the preferred devices; raise PlacementError if the request contradicts itself."""
        if self.on_demand is not None and any(map(is_on_demand_id, available)):
            return self.on_demand.prefer(resource, available, must_include, size)
        return self.existing.prefer(resource, available, must_include, size)

    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        """Allocate devices to containers; raise AllocationRefusedError for the whole request.

        The kubelet admits one pod at a time, and requests a resource once for each container: it has recorded the
        container of its last request, or rejected that pod.
        """
        self._state.settle_admissions(SettledAt(self._clock.monotonic_s()), request.resource)
        try:
            if self.on_demand is not None and self.on_demand.takes(request):
                return await self.on_demand.allocate(request)
            return await self.existing.allocate(request)
        except asyncio.CancelledError:  # the kubelet gets no answer, so no container
            self._state.settle_admissions(SettledAt(self._clock.monotonic_s()), request.resource)
            raise

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceId]) -> None:
        """Let a container start with its devices, after its pod's admission; raise AllocationRefusedError."""
        self._state.settle_admissions(SettledAt(self._clock.monotonic_s()), resource, frozenset(devices))
        if existing := [device for device in devices if not is_on_demand_id(device)]:
            await self.existing.pre_start(resource, existing)
        if self.on_demand is not None:
            await self.on_demand.pre_start(resource, devices)

"""The kubelet's requests for devices, and the one interface of the allocators that answer them."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.reasons import Reason


class AllocationRefusedError(GpuvirtError):
    """A request is refused; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class AllocationRequest(msgspec.Struct, frozen=True):
    """A request of the kubelet: devices of one resource, for each container of a pod."""

    resource: ResourceName
    containers: Sequence[Sequence[DeviceId]]


class ContainerAllocator(Protocol):
    """Allocates devices, on-demand vGPUs or units to containers, and lets the containers start with them."""

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int, /
    ) -> Sequence[DeviceId]:
        """Return the preferred devices; raise PlacementError if the request contradicts itself."""
        ...

    def allocate(self, request: AllocationRequest, /) -> Awaitable[tuple[Attachment, ...]]:
        """Allocate devices; return an answer for each container. Raise AllocationRefusedError for the whole request."""
        ...

    def pre_start(self, resource: ResourceName, devices: Sequence[DeviceId], /) -> Awaitable[None]:
        """Let a container start with its devices, before each of its starts; raise AllocationRefusedError."""
        ...

"""Who gets what: answers the kubelet when it asks for devices, or says why not.

What was seen at the last look is a moment old, so each device is looked at once more before it is given away. Of a
request of which something is refused nothing is given.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.attachment import Attachment, attach
from gpuvirt.model.candidates import Candidate
from gpuvirt.model.holds import find_holds
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.ledger import Entry, record
from gpuvirt.model.offers import Offer
from gpuvirt.model.placement import Place, prefer
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node import lastlook
from gpuvirt.node.state import NodeState


class AllocationRefusedError(GpuvirtError):
    """A request can't be met; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class Broker:
    """Gives devices away, and remembers to whom."""

    def __init__(self, state: NodeState, kernel: Kernel, clock: Clock, given: Callable[[], None]) -> None:
        """`given` is called after each allocation."""
        self._state = state
        self._kernel = kernel
        self._clock = clock
        self._given = given
        self._numbers = itertools.count(1)

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the devices to prefer; raise PlacementError where the request contradicts itself."""
        offer = self._state.offers.by_resource.get(resource, Offer(resource))
        places = {
            device.id: Place(device.candidate.numa_node, device.candidate.group, device.candidate.target.gpu)
            for device in offer.devices.values()
        }
        return prefer(available, must_include, size, places, self._state.settings.vgpu_placement)

    def allocate(self, resource: ResourceName, containers: Sequence[Sequence[DeviceId]]) -> tuple[Attachment, ...]:
        """Give devices to containers, an answer for each; raise AllocationRefusedError and give nothing."""
        inventory, offer = self._state.inventory, self._state.offers.by_resource.get(resource)
        if inventory is None or offer is None:
            raise AllocationRefusedError(
                Reason(ReasonCode.UNKNOWN_RESOURCE, resource, "is not offered on this node", fix="see: gpuvirt devices")
            )
        entries = self._state.entries
        attachments: list[Attachment] = []
        for ids in containers:
            devices = tuple(self._usable(inventory, offer, ids))
            if (reason := find_holds(entries, self._state.resources).in_the_way(resource, devices)) is not None:
                raise AllocationRefusedError(reason)
            attachments.append(attach(inventory, resource, devices, self._state.settings))
            entries = record(entries, self._entries(resource, devices))
        self._state.entries = entries
        self._given()
        return tuple(attachments)

    def _usable(self, inventory: Inventory, offer: Offer, ids: Sequence[DeviceId]) -> Iterator[Candidate]:
        """Yield the devices of a request; raise AllocationRefusedError at the first that can't be used."""
        for device_id in dict.fromkeys(ids):
            reason = self._why_not(inventory, offer, device_id)
            if reason is None:
                yield offer.devices[device_id].candidate
            elif not (self._state.settings.compat.drop_mismatched_vgpus and reason.code in _MISMATCHES):
                raise AllocationRefusedError(reason)

    def _why_not(self, inventory: Inventory, offer: Offer, device_id: DeviceId) -> Reason | None:
        device = offer.devices.get(device_id)
        if device is None and (withheld := self._state.offers.withheld.get(device_id)) is not None:
            return withheld
        if device is None:
            known = ", ".join(offer.devices) or "none"
            return Reason(
                ReasonCode.UNKNOWN_DEVICE, device_id, f"is no device of {offer.resource}", seen=f"its devices: {known}"
            )
        if not device.health.healthy:
            return device.health.against[0]
        changed = next(lastlook.changes(self._kernel, inventory, device.candidate), None)
        return changed or lastlook.users(self._kernel, inventory.facts, device.candidate)

    def _entries(self, resource: ResourceName, devices: Sequence[Candidate]) -> Iterator[Entry]:
        now = self._clock.now()
        allocation = f"allocate:{now.isoformat()}:{next(self._numbers)}"
        for device in devices:
            yield Entry(resource, device.id, device.target, device.group, allocation, now)


_MISMATCHES = frozenset({ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED})

"""Checks the devices of a container before each of its starts: the answer to PreStartContainer."""

from collections.abc import Sequence

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.containerstarts import why_no_start
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.reasons import unhealthy
from gpuvirt.node.allocation.allocator import AllocationRefusedError
from gpuvirt.node.known.kubeletrecord import KubeletRecord
from gpuvirt.node.known.state import NodeState


class StartCheck:
    """Refuses the start of a container that would get other devices' nodes."""

    def __init__(self, state: NodeState, kubelet: KubeletRecord) -> None:
        self._state = state
        self._kubelet = kubelet

    def verify(self, resource: ResourceName, devices: Sequence[DeviceId]) -> None:
        """Raise AllocationRefusedError if a container must not start with devices; the kubelet tries again."""
        named = [device for device in devices if not is_on_demand_id(device)]
        if not named:
            return
        if (inventory := self._state.inventory) is None:
            raise AllocationRefusedError(unhealthy.unknown_resource(resource))
        entries, recorded = self._state.ledger.entries, self._kubelet.recorded()
        if (reason := why_no_start(inventory, entries, recorded, resource, named)) is not None:
            raise AllocationRefusedError(reason)

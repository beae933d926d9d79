"""Checks the devices of a container before each of its starts: the answer to PreStartContainer."""

from collections.abc import Sequence

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.containerstarts import why_no_start
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.reasons import unhealthy
from gpuvirt.node.allocation.allocator import AllocationRefusedError
from gpuvirt.node.known.state import NodeState


def verify_start(
    state: NodeState, recorded: Recorded | Unknown, resource: ResourceName, devices: Sequence[DeviceId]
) -> None:
    """Raise AllocationRefusedError if a container must not start with devices; the kubelet tries again.

    Ids of on-demand vGPUs, which name no device, are passed over.
    """
    named = [device for device in devices if not is_on_demand_id(device)]
    if not named:
        return
    if (inventory := state.inventory) is None:
        raise AllocationRefusedError(unhealthy.unknown_resource(resource))
    if (reason := why_no_start(inventory, state.ledger.entries, recorded, resource, named)) is not None:
        raise AllocationRefusedError(reason)

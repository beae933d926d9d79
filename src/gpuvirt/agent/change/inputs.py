"""The inputs of a change besides the host's state: allocations to pods, offered vGPUs, and the admin's permissions."""

from collections.abc import Callable

import msgspec

from gpuvirt.agent.change.gate.unsettled import Read, no_readings
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.state import Account
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import NO_NAMES, TypeNames


class Inputs(msgspec.Struct, frozen=True):
    """The inputs of changes besides the host's state."""

    account: Callable[[Inventory], Account]
    """Returns the allocations of the devices in an inventory; a change calls it under the unit's lock."""
    type_names: TypeNames = NO_NAMES
    """The names of vGPU types. A host shows only names of types that it could create now."""
    allowed: frozenset[PciAddress] = frozenset()
    """Functions of other slots whose driver the admin permits to change with a GPU of their IOMMU group."""
    forced: bool = False
    """Whether a GPU may be taken from processes of the host that use it natively."""
    require_reset: bool = True
    """Whether a GPU that a VM had returns to the host only if the kernel can reset it."""
    grace_without_driver: bool = False
    """Whether a Grace GPU may be bound to vfio-pci where the host lacks the driver for its memory."""
    driver_may_come: bool = False
    """Whether a driver container may still load NVIDIA's driver."""

    readings: Read = no_readings
    """Returns the latest readings of the kubelet's two accounts; a change calls it under the unit's lock."""

    def newest(self, inventory: Inventory) -> PodAllocations:
        """Return the present allocations to pods; any thread calls it."""
        return self.account(inventory).allocations

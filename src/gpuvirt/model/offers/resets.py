"""Whether a whole GPU is reset between two VMs: without a reset the next tenant can read its memory."""

from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, ResetScope, Unread
from gpuvirt.model.reasons import Reason, unhealthy

NO_WAY = "has no reset method that the kernel supports"
KEEPS_MEMORY = "the next VM may read the memory that the last VM left in it, or hang"


def is_reset(functions: Mapping[PciAddress, PciFunction], address: PciAddress, scope: ResetScope | None) -> bool | None:
    """Return whether VFIO resets a function between two VMs, None where that is unknown.

    vfio-pci resets a function when a VM opens it and when the VM closes it. Where that fails, vfio-pci resets the bus
    when its last function is closed, and only if it has all functions of that bus.
    """
    if scope not in {ResetScope.BUS, ResetScope.SHARED_BUS}:
        return None if scope is None else scope is ResetScope.FUNCTION
    bus = address.rpartition(":")[0]
    others = [function for other, function in functions.items() if other.rpartition(":")[0] == bus and other != address]
    if not others and scope is ResetScope.SHARED_BUS:
        return False
    if all(function.on_vfio for function in others):
        return True
    return None if any(isinstance(function.driver, Unread) for function in others) else False


def why_withheld(address: PciAddress, tenant: str) -> Reason:
    """Return why a function that can't be reset is withheld from other pods than its last one."""
    return unhealthy.not_reset(address, tenant, NO_WAY, KEEPS_MEMORY)

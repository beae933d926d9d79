"""Whether VFIO can reset a function between two tenants, from the kernel's files about the function and its bus."""

from collections.abc import Mapping
from enum import Enum
from typing import Never

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, ResetScope, Unread


class Reset(Enum):
    """Whether vfio-pci resets a function; it has no truth value, so that unknown is never taken for an answer."""

    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"
    """A file of the function or of its bus could not be read."""

    def __bool__(self) -> Never:
        """Refuse to be a truth value."""
        raise TypeError("a reset is possible, impossible or unknown: compare with a member")


def reset_of(functions: Mapping[PciAddress, PciFunction], address: PciAddress) -> Reset:
    """Return whether vfio-pci resets a function when a VM opens it and when the VM closes it.

    Where the function has no reset of its own, vfio-pci resets the bus when its last function is closed, and only if it
    has all functions of that bus (drivers/vfio/pci/vfio_pci_core.c: `vfio_pci_core_disable`).
    """
    function = functions.get(address)
    scope = function.reset if function is not None else None
    if scope is None:
        return Reset.UNKNOWN
    if scope is ResetScope.FUNCTION:
        return Reset.POSSIBLE
    if scope is ResetScope.NONE:
        return Reset.IMPOSSIBLE
    bus = address.rpartition(":")[0]
    others = [function for other, function in functions.items() if other.rpartition(":")[0] == bus and other != address]
    if not others and scope is ResetScope.SHARED_BUS:
        return Reset.IMPOSSIBLE
    if all(function.on_vfio for function in others):
        return Reset.POSSIBLE
    return Reset.UNKNOWN if any(isinstance(function.driver, Unread) for function in others) else Reset.IMPOSSIBLE

"""The drivers of simulated functions: which are VFIO's, which leave DMA alone, and what a native one creates."""

import re
from collections.abc import Callable
from typing import Protocol

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import GROUP_FRIENDLY_DRIVERS

VFIO_DRIVER = re.compile(r"[a-z0-9_-]+[_-]vfio[_-]pci|vfio-pci")
"""The name of a driver that is vfio-pci or builds on vfio-pci-core; all such drivers of the kernel match."""
PF_DRIVERS = frozenset({"pci-pf-stub"})
"""Drivers that only allow VFs to be created; vfio-pci allows it with its parameter enable_sriov."""


def is_vfio(driver: str | None) -> bool:
    """Return whether a driver makes VFIO devices of its functions."""
    return driver is not None and VFIO_DRIVER.fullmatch(driver) is not None


def leaves_dma(driver: str) -> bool:
    """Return whether a driver leaves a function's DMA to the owner of its IOMMU group."""
    return driver in GROUP_FRIENDLY_DRIVERS or is_vfio(driver)


class DriverObjects(Protocol):
    """The objects that a native driver creates for a function, and removes again."""

    def on_bind(self, slot: PciAddress, /) -> None:
        """Create the objects: the driver was bound to the function."""
        ...

    def on_unbind(self, slot: PciAddress, finish: Callable[[], None], /) -> None:
        """Remove the objects, because the driver is being unbound; call `finish` when none is in use any more."""
        ...

    def on_unplug(self, slot: PciAddress, /) -> None:
        """Remove the objects at once: the function was unplugged."""
        ...

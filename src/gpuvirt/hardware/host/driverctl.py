"""The drivers to which an administrator has bound functions with driverctl, now and after each boot."""

from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

PINS = HostPath("/etc/driverctl.d")
"""driverctl has one file for each function: `pci-ADDRESS`, in older versions `ADDRESS`."""


def read_pins(kernel: Kernel, addresses: Iterable[PciAddress]) -> Mapping[PciAddress, str]:
    """Return the driver that driverctl binds each function to, for the functions in its configuration."""
    names = attributes.names(kernel, PINS)
    if not isinstance(names, list):
        return {}
    found = {
        address: attributes.text(kernel, HostPath(f"{PINS}/{name}"))
        for address in addresses
        for name in (f"pci-{address}", address)
        if name in names
    }
    return {address: driver for address, driver in found.items() if isinstance(driver, str) and driver}

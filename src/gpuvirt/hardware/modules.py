"""The kernel's modules: which drivers of PCI functions are loaded, and what all modules say they are for."""

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.sysfs import PCI_DRIVERS, device_path
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

RELEASE = HostPath("/proc/sys/kernel/osrelease")
ALIASES_BYTES = 16 << 20
"""Debian's 6.1 has 1.4 MB of them."""


def loaded_drivers(kernel: Kernel) -> frozenset[str]:
    """Return the drivers of PCI functions that are there."""
    names = attributes.names(kernel, PCI_DRIVERS)
    return frozenset(names) if isinstance(names, list) else frozenset()


def read_aliases(kernel: Kernel) -> str:
    """Return the text of modules.alias of the kernel that runs, an empty one where there is none."""
    release = attributes.text(kernel, RELEASE)
    if not isinstance(release, str) or "/" in release:
        return ""
    for folder in ("/lib/modules", "/usr/lib/modules"):
        try:
            return kernel.read(HostPath(f"{folder}/{release}/modules.alias"), limit=ALIASES_BYTES).decode(
                "ascii", "replace"
            )
        except OSError:
            continue
    return ""


def has_driver(kernel: Kernel, driver: str) -> str | None:
    """Return the name under which a driver is there: modules are named with `_`, drivers at times with `-`."""
    loaded = loaded_drivers(kernel)
    return next((name for name in (driver, driver.replace("_", "-")) if name in loaded), None)


def loaded_as(kernel: Kernel, module: str) -> tuple[str, ...]:
    """Return the names of the drivers of PCI functions that a module or driver of a name has brought."""
    if (name := has_driver(kernel, module)) is not None:
        return (name,)
    names = attributes.names(kernel, HostPath(f"/sys/module/{module.replace('-', '_')}/drivers"))
    found = names if isinstance(names, list) else []
    return tuple(sorted(one.removeprefix("pci:") for one in found if one.startswith("pci:")))


def driver_of(kernel: Kernel, address: str) -> str | Unread | None:
    """Return the driver that has a function now."""
    return attributes.link_name(kernel, device_path(address, "driver"))

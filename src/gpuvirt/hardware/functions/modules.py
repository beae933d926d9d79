"""The drivers of PCI functions: loaded ones, the aliases of modules, a function's own, and binding to another.

Binding and unbinding (Documentation/ABI/testing/sysfs-bus-pci) take the proof of the function. The kernel sleeps in an
unbind while the function is in use.
"""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.sysfs import DRIVERS_PROBE, PCI_DRIVERS, device_path, driver_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.paths import HostPath


def unbind(kernel: Kernel, address: PciAddress, driver: str, proof: Proof) -> None:
    """Unbind a function from its driver; raise OSError (ENODEV: it has another driver)."""
    proof.spend(address)
    kernel.write(driver_path(driver, "unbind"), address.encode())


def bind(kernel: Kernel, address: PciAddress, driver: str, proof: Proof) -> None:
    """Bind a function that has no driver to a driver; raise OSError as the driver does."""
    proof.spend(address)
    kernel.write(driver_path(driver, "bind"), address.encode())


def probe(kernel: Kernel, address: PciAddress, proof: Proof) -> None:
    """Have the kernel choose a driver for a function that has none; raise OSError as that driver does."""
    proof.spend(address)
    kernel.write(DRIVERS_PROBE, address.encode())


RELEASE = HostPath("/proc/sys/kernel/osrelease")
ALIASES_BYTES = 16 << 20
"""The modules.alias of Debian's 6.1 has 1.4 MB."""


def loaded_drivers(kernel: Kernel) -> frozenset[str]:
    """Return the loaded drivers of PCI functions."""
    names = attributes.names(kernel, PCI_DRIVERS)
    return frozenset(names) if isinstance(names, list) else frozenset()


def read_aliases(kernel: Kernel) -> str:
    """Return the text of the running kernel's modules.alias, empty where the file does not exist."""
    release = attributes.text(kernel, RELEASE)
    if not isinstance(release, str) or "/" in release:
        return ""
    for folder in ("/lib/modules", "/usr/lib/modules"):
        try:
            return kernel.read(HostPath(f"{folder}/{release}/modules.alias"), limit=ALIASES_BYTES).decode(
                "ascii", "replace"
            )
        except OSError:
            continue  # unknown: without aliases a device gets vfio-pci, and no native module is found
    return ""


def has_driver(kernel: Kernel, driver: str) -> str | None:
    """Return the name of a loaded driver, None where it is not loaded: some drivers are named with `-`, modules with
    `_`."""
    loaded = loaded_drivers(kernel)
    return next((name for name in (driver, driver.replace("_", "-")) if name in loaded), None)


def loaded_as(kernel: Kernel, module: str) -> tuple[str, ...]:
    """Return the loaded PCI drivers of a module or driver of this name."""
    if (name := has_driver(kernel, module)) is not None:
        return (name,)
    names = attributes.names(kernel, HostPath(f"/sys/module/{module.replace('-', '_')}/drivers"))
    found = names if isinstance(names, list) else []
    return tuple(sorted(name.removeprefix("pci:") for name in found if name.startswith("pci:")))


def driver_of(kernel: Kernel, address: str) -> str | Unread | None:
    """Return the current driver of a PCI function."""
    return attributes.link_name(kernel, device_path(address, "driver"))

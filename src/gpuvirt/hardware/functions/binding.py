"""Binds PCI functions to drivers and unbinds them: Documentation/ABI/testing/sysfs-bus-pci.

Each write takes the proof of its function. The kernel sleeps in an unbind while the function is in use.
"""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.sysfs import DRIVERS_PROBE, driver_path
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof


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

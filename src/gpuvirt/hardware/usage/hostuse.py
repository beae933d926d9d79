"""The host's own uses of a function, which keep it on its driver: the console, a disk in use, a network in use."""

from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.diskuse import read_disk_use
from gpuvirt.paths import HostPath

DISPLAY, STORAGE, NETWORK, SERIAL_BUS = 0x03, 0x01, 0x02, 0x0C
"""Base classes of PCI functions; USB, FireWire and Fibre Channel are serial buses, and may have disks behind them."""
IFF_UP = 1
GRAPHICS = HostPath("/sys/class/graphics")


def read_host_uses(kernel: Kernel, functions: Iterable[PciFunction]) -> Mapping[PciAddress, str]:
    """Return the host's use of each function that it uses: `drives the console (fb0)`."""
    found: dict[PciAddress, str] = {}
    for function in functions:
        reader = _READERS.get(function.class_code >> 16)
        use = reader(kernel, function.address) if reader is not None else None
        if use is not None:
            found[function.address] = use
    return found


def _console(kernel: Kernel, address: PciAddress) -> str | None:
    """Return the use of the firmware's display as the console, None where the function has no framebuffer."""
    boot_vga = attributes.text(kernel, device_path(address, "boot_vga"))
    if isinstance(boot_vga, Unread):
        return f"may drive the console: {boot_vga.path} can't be read ({boot_vga.detail})"
    if boot_vga != "1":
        return None
    names = attributes.names(kernel, GRAPHICS)
    if isinstance(names, Unread):
        return f"may drive the console: {names.path} can't be read ({names.detail})"
    for name in names or ():
        if not name.startswith("fb") or name == "fbcon":
            continue
        try:
            device = kernel.readlink(HostPath(f"{GRAPHICS}/{name}/device"))
        except OSError as error:
            if error.errno in attributes.ABSENT:
                continue
            return f"may drive the console ({name}, whose device can't be read)"
        # The firmware's framebuffer is a platform device in the memory of the boot display.
        if address in device or any(
            kind in device for kind in ("efi-framebuffer", "simple-framebuffer", "vesa-framebuffer")
        ):
            return f"drives the console ({name})"
    return None


def _network(kernel: Kernel, address: PciAddress) -> str | None:
    folder = device_path(address, "net")
    names = attributes.names(kernel, folder)
    if isinstance(names, Unread):
        return f"may be a network interface in use: {names.path} can't be read ({names.detail})"
    for name in names or ():
        flags = attributes.text(kernel, HostPath(f"{folder}/{name}/flags"))
        try:
            is_up = not isinstance(flags, str) or bool(int(flags, 16) & IFF_UP)
        except ValueError:
            is_up = True
        if is_up:
            return f"is the network interface {name}, which is up"
    return None


_READERS = {DISPLAY: _console, STORAGE: read_disk_use, NETWORK: _network, SERIAL_BUS: read_disk_use}

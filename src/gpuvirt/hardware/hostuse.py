"""What the host itself needs a function for, so that it never moves: the console, a disk in use, a network in use."""

from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

DISPLAY, STORAGE, NETWORK = 0x03, 0x01, 0x02
IFF_UP = 1


def read_host_uses(kernel: Kernel, functions: Iterable[PciFunction]) -> Mapping[PciAddress, str]:
    """Return, for each function that the host needs, what for: `drives the console (fb0)`."""
    found: dict[PciAddress, str] = {}
    for function in functions:
        reader = _READERS.get(function.class_code >> 16)
        use = reader(kernel, function.address) if reader is not None else None
        if use is not None:
            found[function.address] = use
    return found


def _console(kernel: Kernel, address: PciAddress) -> str | None:
    """The firmware's display, while a framebuffer is on it; without one nobody looks at it."""
    if attributes.text(kernel, HostPath(f"/sys/bus/pci/devices/{address}/boot_vga")) != "1":
        return None
    for name in _names(kernel, "/sys/class/graphics"):
        if not name.startswith("fb") or name == "fbcon":
            continue
        try:
            device = kernel.readlink(HostPath(f"/sys/class/graphics/{name}/device"))
        except OSError:
            continue
        # The firmware's own framebuffer is a device of the platform, and lies in the memory of the boot display.
        if address in device or any(
            kind in device for kind in ("efi-framebuffer", "simple-framebuffer", "vesa-framebuffer")
        ):
            return f"drives the console ({name})"
    return None


def _disk(kernel: Kernel, address: PciAddress) -> str | None:
    mounted = attributes.text(kernel, HostPath("/proc/1/mountinfo"), limit=1 << 20)
    swaps = attributes.text(kernel, HostPath("/proc/swaps"))
    for name in _names(kernel, "/sys/class/block"):
        folder = HostPath(f"/sys/class/block/{name}")
        try:
            lies = kernel.readlink(folder)
        except OSError:
            continue
        if f"/{address}/" not in lies:
            continue
        number = attributes.text(kernel, HostPath(f"{folder}/dev"))
        if not isinstance(mounted, str) or not isinstance(number, str):
            return f"has the disk {name}, of which can't be told whether it is in use"
        if f" {number} " in mounted or f"/dev/{name} " in f"{swaps} " or _names(kernel, f"{folder}/holders"):
            return f"has the disk {name}, which is in use"
    return None


def _network(kernel: Kernel, address: PciAddress) -> str | None:
    folder = f"/sys/bus/pci/devices/{address}/net"
    for name in _names(kernel, folder):
        flags = attributes.text(kernel, HostPath(f"{folder}/{name}/flags"))
        try:
            is_up = not isinstance(flags, str) or bool(int(flags, 16) & IFF_UP)
        except ValueError:
            is_up = True
        if is_up:
            return f"is the network interface {name}, which is up"
    return None


def _names(kernel: Kernel, folder: str) -> list[str]:
    names = attributes.names(kernel, HostPath(folder))
    return names if isinstance(names, list) else []


_READERS = {DISPLAY: _console, STORAGE: _disk, NETWORK: _network}

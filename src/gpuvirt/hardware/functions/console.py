"""Reads whether a display shows the host's console: the firmware's framebuffer is in its memory."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

DISPLAY = 0x03
"""The base class of displays."""
GRAPHICS = HostPath("/sys/class/graphics")
FIRMWARE_FRAMEBUFFERS = ("efi-framebuffer", "simple-framebuffer", "vesa-framebuffer")
"""Platform devices in the memory of the display that the firmware has chosen (`boot_vga`)."""


def read_console(kernel: Kernel, address: PciAddress) -> str | None:
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
        try:
            device = kernel.readlink(HostPath(f"{GRAPHICS}/{name}/device"))
        except OSError as error:
            if error.errno in attributes.ABSENT:  # as of `fbcon`
                continue
            return f"may drive the console ({name}, whose device can't be read)"  # unknown: counts as in use
        if address in device or any(kind in device for kind in FIRMWARE_FRAMEBUFFERS):
            return f"drives the console ({name})"
    return None

"""Parses kernel uevents, and selects those of devices that matter to gpuvirt.

Source: lib/kobject_uevent.c: `action@devpath`, then NUL-separated `KEY=value`. Since Linux 4.18 the kernel sends
uevents to every network namespace of the initial user namespace, so a pod without the host network receives them too.
"""

from collections.abc import Mapping

SUBSYSTEMS = frozenset({"pci", "vfio", "vfio-dev", "mdev", "mdev_bus", "iommu", "egm", "drivers", "module", "misc"})
"""Subsystems whose events can change the devices that a node offers; those of network and block cannot."""


def parse(message: bytes) -> Mapping[str, str]:
    """Return the variables of a kernel uevent, empty for other messages (those of udev begin with `libudev`)."""
    head, *fields = message.split(b"\0")
    if b"@" not in head:
        return {}
    pairs = (field.decode("utf-8", "replace").partition("=") for field in fields if b"=" in field)
    return {key: value for key, _, value in pairs}


def concerns_devices(message: bytes) -> bool:
    """Return whether a message is a kernel uevent that can change the devices that a node offers."""
    return parse(message).get("SUBSYSTEM", "") in SUBSYSTEMS

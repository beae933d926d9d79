"""Kernel uevents: what a netlink message says, and whether it is about devices that we care for.

Source: lib/kobject_uevent.c: `action@devpath`, then NUL-separated `KEY=value`. Since Linux 4.18 they reach every
network namespace of the initial user namespace, so a pod that has no host network hears them too.
"""

from collections.abc import Mapping

SUBSYSTEMS = frozenset({"pci", "vfio", "vfio-dev", "mdev", "mdev_bus", "iommu", "egm", "drivers", "module", "misc"})
"""Subsystems whose events can change what a node offers; network, block and the like are many and say nothing to us."""


def parse(message: bytes) -> Mapping[str, str]:
    """Return the variables of a kernel uevent, empty when the message is none (udev's own begin with `libudev`)."""
    head, *fields = message.split(b"\0")
    if b"@" not in head:
        return {}
    pairs = (field.decode("utf-8", "replace").partition("=") for field in fields if b"=" in field)
    return {key: value for key, _, value in pairs}


def concerns_devices(message: bytes) -> bool:
    """Return whether a message is a kernel uevent that can change what a node offers."""
    return parse(message).get("SUBSYSTEM", "") in SUBSYSTEMS

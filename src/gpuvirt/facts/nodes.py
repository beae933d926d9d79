"""A file under `/dev` that a container gets: its device number, and the device that the kernel lists by that number."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gpuvirt.facts.pci import Unread
from gpuvirt.paths import HostPath


class DeviceNumber(NamedTuple):
    """The number of a device node, as `stat` reports it."""

    major: int
    minor: int


NO_DEVICE = DeviceNumber(0, 0)


class DeviceNode(msgspec.Struct, frozen=True):
    """One file under `/dev`."""

    path: HostPath
    number: DeviceNumber | Unread | None
    """The device number; `NO_DEVICE` for a folder or a plain file, None where nothing has this path."""
    device: HostPath | Unread | None = None
    """The device's folder in `/sys`; None where the kernel lists no device with this number."""


ReadNode = Callable[[HostPath], DeviceNode]
"""Reads a file under `/dev`; any thread calls it."""


def unread_node(path: HostPath) -> DeviceNode:
    """Return a node of which nothing is known, for a process that does not see the host's `/dev`."""
    return DeviceNode(path, Unread(path, seen="not read"))

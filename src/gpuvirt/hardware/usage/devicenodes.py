"""Reads device nodes that other programs name by path: their numbers, and the devices that have these numbers.

The kernel links each character device at `/sys/dev/char/MAJOR:MINOR`, and each block device at `/sys/dev/block`
(device_create_sys_dev_entry). NVIDIA's driver registers no devices for its nodes, so these have no link.
"""

import os
import posixpath

from gpuvirt.facts.nodes import NO_DEVICE, DeviceNode, DeviceNumber
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

FOLDERS = (HostPath("/sys/dev/char"), HostPath("/sys/dev/block"))


def read_node(kernel: Kernel, path: HostPath) -> DeviceNode:
    """Return a file under `/dev` with its device; other paths are not read, since they may be on a dead server."""
    path = HostPath(posixpath.normpath(path))
    if not path.startswith("/dev/"):
        return DeviceNode(path, NO_DEVICE)
    try:
        found = kernel.device_number(path)
    except OSError as error:
        return DeviceNode(path, None if error.errno in attributes.ABSENT else Unread(path, errno=error.errno))
    number = DeviceNumber(os.major(found), os.minor(found))
    return DeviceNode(path, number, _device(kernel, number) if number != NO_DEVICE else None)


def _device(kernel: Kernel, number: DeviceNumber) -> HostPath | Unread | None:
    """Return the folder in `/sys` of the device with a number.

    A number that both a character and a block device have counts as the character device: no GPU is a block device.
    """
    for folder in FOLDERS:
        link = HostPath(f"{folder}/{number.major}:{number.minor}")
        try:
            return HostPath(posixpath.normpath(posixpath.join(folder, kernel.readlink(link))))
        except OSError as error:  # unknown: absent in one folder, the number may be in the other
            if error.errno not in attributes.ABSENT:
                return Unread(link, errno=error.errno)
    return None

"""Discovers GPUs on a host without privileges: reads ids and classes of PCI functions, and `/etc/os-release`.

The kernel stores a function's id and class when it finds the function, so reading them does not access the device.
"""

import errno
from collections.abc import Iterator

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import parse_pci_address
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.snapshot import Discovery
from gpuvirt.facts.sysfs import PCI_DEVICES
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import pci
from gpuvirt.paths import HostPath

OS_RELEASE = HostPath("/etc/os-release")

GPU_CLASSES = frozenset({0x0300, 0x0302})
"""VGA and 3D controllers, as in NVIDIA's operator. An NVSwitch (0x0680) alone does not make a node a GPU node."""


def discover(kernel: Kernel) -> Discovery:
    """Return whether the host has an NVIDIA GPU, and its operating system."""
    verdicts = list(_verdicts(kernel))
    unread = [verdict for verdict in verdicts if isinstance(verdict, Unread)]
    gpu = True if True in verdicts else None if unread else False
    os_release = attributes.read_attribute(kernel, OS_RELEASE)
    if not isinstance(os_release.value, str):
        missing = Unread(OS_RELEASE, errno=errno.ENOENT)
        unread.append(missing if os_release.value is None else os_release.value)
    return Discovery(gpu, os_release, tuple(unread))


def _verdicts(kernel: Kernel) -> Iterator[bool | Unread]:
    """Yield for each PCI function whether it is an NVIDIA GPU; a function that disappears meanwhile is not."""
    names = attributes.names(kernel, PCI_DEVICES)
    if not isinstance(names, list):
        # A kernel without PCI and a folder that was not mounted look the same.
        yield Unread(PCI_DEVICES, errno=errno.ENOENT) if names is None else names
        return
    for name in names:
        try:
            address = parse_pci_address(name)
        except InvalidIdError:
            continue
        vendor = attributes.parsed(kernel, pci.attribute(address, "vendor"), attributes.pci_id)
        if vendor != NVIDIA:
            yield vendor if isinstance(vendor, Unread) else False
            continue
        code = attributes.parsed(kernel, pci.attribute(address, "class"), attributes.pci_class)
        yield code if isinstance(code, Unread) else code is not None and code >> 8 in GPU_CLASSES

"""Finds the processes that use a function through its native driver: they have a device node of that driver open.

The nodes are those of DRM and sound below the function's own folder, and `/dev/nvidia0`, whose number NVIDIA's driver
shows in /proc. Nodes that serve all GPUs (`/dev/nvidiactl`, `/dev/nvidia-uvm`) do not identify a GPU.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.deviceids import MINOR, read_information
from gpuvirt.hardware.usage.processes import command_of, read_open_nodes
from gpuvirt.paths import HostPath

NVIDIA_MAJOR = 195
"""Documentation/admin-guide/devices.txt; each GPU has its own minor number."""

CLASSES = ("accel", "drm", "sound")
"""The folders in which a function's driver lists its devices: Intel's NPU, graphics and compute, HDMI audio."""


def read_native_users(kernel: Kernel, addresses: Iterable[PciAddress]) -> Mapping[PciAddress, tuple[User, ...]] | None:
    """Return the users of each function, None where a process or a node number could not be seen."""
    owner: dict[int, PciAddress] = {}
    for address in addresses:
        for number in _device_numbers(kernel, address):
            if isinstance(number, Unread):
                return None
            owner[number] = address
    opened = read_open_nodes(kernel)
    if isinstance(opened, Unread):
        return None
    found: defaultdict[PciAddress, dict[int, User]] = defaultdict(dict)
    for file in opened:
        owned = owner.get(file.device)
        if owned is not None and file.pid not in found[owned]:
            found[owned][file.pid] = User(file.pid, command_of(kernel, file.pid), file.path)
    return {address: tuple(found[address][pid] for pid in sorted(found[address])) for address in sorted(found)}


def _device_numbers(kernel: Kernel, address: PciAddress) -> Iterator[int | Unread]:
    """Yield the numbers of the device nodes that a function's driver has created, Unread where one is unknown."""
    for kind in CLASSES:
        folder = f"{device_path(address)}/{kind}"
        for device in _names(kernel, folder):
            if isinstance(device, Unread):
                yield device
                continue
            yield from _number(kernel, f"{folder}/{device}")
            for part in _names(kernel, f"{folder}/{device}") if kind == "sound" else ():
                yield from (part,) if isinstance(part, Unread) else _number(kernel, f"{folder}/{device}/{part}")
    information = read_information(kernel, address)
    if isinstance(information, Unread):
        yield information
    elif information is not None and (match := MINOR.search(information)):
        yield os.makedev(NVIDIA_MAJOR, int(match[1]))


def _names(kernel: Kernel, folder: str) -> Sequence[str | Unread]:
    names = attributes.names(kernel, HostPath(folder))
    return (names,) if isinstance(names, Unread) else names or ()


def _number(kernel: Kernel, device: str) -> Iterator[int | Unread]:
    number = attributes.device_number(kernel, HostPath(f"{device}/dev"))
    if number is not None:
        yield number

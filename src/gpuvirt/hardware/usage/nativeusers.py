"""Finds the processes that use a function through its native driver: they have a device node of that driver open.

A function's nodes are all devices with a number below its own folder, which `/sys/dev` lists by number: those of DRM,
sound, USB, I2C, input and disks. NVIDIA's driver shows the number of `/dev/nvidia0` in /proc alone. Nodes that serve
all GPUs (`/dev/nvidiactl`, `/dev/nvidia-uvm`, `/dev/kfd`) do not identify a GPU; their users open a GPU's node, too.

An AMD GPU in a partition mode (MI300X in CPX: 8 partitions) has a render node for each partition. That of the first one
lies below the function, all others below `/sys/devices/platform/amdgpu_xcp_1` (amdgpu_xcp_drm_dev_alloc; `amdgpu_xcp.1`
before 6.11), which names no GPU. The topology of `/dev/kfd` has the GPU of each render node.
"""

import errno
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.nodes import NO_DEVICE, DeviceNode, DeviceNumber
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import modules
from gpuvirt.hardware.functions.deviceids import MINOR, read_information
from gpuvirt.hardware.usage.processes import command_of, read_open_nodes
from gpuvirt.paths import HostPath

FOLDERS = (HostPath("/sys/dev/char"), HostPath("/sys/dev/block"))


def read_node(kernel: Kernel, path: HostPath) -> DeviceNode:
    """Return a file under `/dev` with its device; other paths are not read, since they may be on a dead server.

    The kernel links each character device at `/sys/dev/char/MAJOR:MINOR`, and each block device at `/sys/dev/block`
    (device_create_sys_dev_entry). NVIDIA's driver registers no devices for its nodes, so these have no link.
    """
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


NVIDIA_MAJOR = 195
"""Documentation/admin-guide/devices.txt; each GPU has its own minor number."""
_FUNCTION = re.compile(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7])(?=/)")

NODE = re.compile(r"/platform/amdgpu_xcp[._][0-9]+/(?:drm/renderD([0-9]+)|.*)\Z")
"""The folder of a device of a partition, with the minor of a render node."""
TOPOLOGY = HostPath("/sys/class/kfd/kfd/topology/nodes")
"""One folder for each GPU or partition (kfd_topology.c: node_show)."""
DRIVER = "amdgpu"
_BYTES = 16384


def read_owners(
    kernel: Kernel, render_minor: int | None, addresses: Collection[PciAddress]
) -> frozenset[PciAddress] | Unread:
    """Return which of these functions has the partition with a render node.

    All of AMD's, where the topology does not tell: each may have it.
    """
    for node in _read_nodes(kernel):
        if render_minor is not None and node.get("drm_render_minor") == render_minor:
            location = node.get("location_id", 0) & 0xFFFF  # bus, device and function
            bus, slot, function = location >> 8, location >> 3 & 0x1F, location & 7
            address = PciAddress(f"{node.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}")
            return frozenset({address} & set(addresses))
    return _of_amds_driver(kernel, addresses)


def _of_amds_driver(kernel: Kernel, addresses: Collection[PciAddress]) -> frozenset[PciAddress] | Unread:
    found: set[PciAddress] = set()
    for address in addresses:
        driver = modules.driver_of(kernel, address)
        if isinstance(driver, Unread):
            return driver
        if driver == DRIVER:
            found.add(address)
    return frozenset(found)


def _read_nodes(kernel: Kernel) -> Iterator[Mapping[str, int]]:
    """Yield the properties of each node of the topology, without those that can't be read."""
    names = attributes.names(kernel, TOPOLOGY)
    for name in names if isinstance(names, list) else ():
        try:
            content = kernel.read(HostPath(f"{TOPOLOGY}/{name}/properties"), limit=_BYTES)
        except OSError:
            continue  # unknown: a render node that no folder has may belong to each of AMD's GPUs
        pairs = (line.split() for line in content.decode(errors="replace").splitlines())
        yield {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_native_users(
    kernel: Kernel, addresses: Collection[PciAddress], *, mapped: bool = False
) -> Mapping[PciAddress, tuple[OpenDeviceUser, ...]] | Unread:
    """Return the users of each function that has some; Unread where a process or a number can't be seen.

    With `mapped`, processes that have only mapped a node count as well; that reads more of each process.
    """
    opened = read_open_nodes(kernel, mapped=mapped)
    if isinstance(opened, Unread):
        return opened
    owners = _read_owners(kernel, addresses, sorted({file.device for file in opened}))
    if isinstance(owners, Unread):
        return owners
    found: defaultdict[PciAddress, dict[int, OpenDeviceUser]] = defaultdict(dict)
    for file in opened:
        for owner in owners.get(file.device, ()):
            if file.pid not in found[owner]:
                found[owner][file.pid] = OpenDeviceUser(file.pid, command_of(kernel, file.pid), file.path)
    return {address: tuple(found[address][pid] for pid in sorted(found[address])) for address in sorted(found)}


def _read_owners(
    kernel: Kernel, addresses: Collection[PciAddress], opened: Sequence[int]
) -> Mapping[int, frozenset[PciAddress]] | Unread:
    """Return the functions by the numbers of their open nodes. A character and a block device can have one number.

    A host has hundreds of numbers, with some for each CPU and terminal; processes have a dozen of them open.
    """
    owners: defaultdict[int, frozenset[PciAddress]] = defaultdict(frozenset)
    for folder in FOLDERS:
        names = attributes.names(kernel, folder)
        if names is None and folder == FOLDERS[0]:  # each kernel has character devices
            return Unread(folder, errno=errno.ENOENT)
        if isinstance(names, Unread):
            return names
        known = frozenset(names or ())
        for number in opened:
            name = f"{os.major(number)}:{os.minor(number)}"
            found = _read_owner(kernel, HostPath(f"{folder}/{name}"), addresses) if name in known else frozenset()
            if isinstance(found, Unread):
                return found
            if found:
                owners[number] |= found
    for address in addresses:
        information = read_information(kernel, address)
        if isinstance(information, Unread):
            return information
        if information is not None and (minor := MINOR.search(information)):
            owners[os.makedev(NVIDIA_MAJOR, int(minor[1]))] |= {address}
    return owners


def _read_owner(kernel: Kernel, link: HostPath, addresses: Collection[PciAddress]) -> frozenset[PciAddress] | Unread:
    """Return the functions, of these, that a device belongs to; none also for a device that is gone."""
    try:
        target = kernel.readlink(link)
    except OSError as error:
        return frozenset() if error.errno in attributes.ABSENT else Unread(link, errno=error.errno)
    if (node := NODE.search(target)) is not None:
        return read_owners(kernel, int(node[1]) if node[1] else None, addresses)
    functions = _FUNCTION.findall(target)
    return frozenset({PciAddress(functions[-1])} & set(addresses)) if functions else frozenset()

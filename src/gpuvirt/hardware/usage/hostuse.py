"""The host's own uses of a function, which keep it on its driver: the console, a disk in use, a network in use.

A disk is also in use by a VM that has it open. No single file lists all uses of a disk: a file system is mounted by a
device's number or only by its name (btrfs), others claim their disks without either (ZFS), and a VM has a raw disk
open. A disk whose use is unknown counts as used.
"""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.pci import DISPLAY, read_console
from gpuvirt.hardware.usage.processes import read_open_nodes
from gpuvirt.paths import HostPath

STORAGE, NETWORK, SERIAL_BUS = 0x01, 0x02, 0x0C
"""Base classes of PCI functions; USB, FireWire and Fibre Channel are serial buses, and may have disks behind them."""
IFF_UP = 1

BLOCKS = HostPath("/sys/class/block")
MOUNTS = HostPath("/proc/1/mountinfo")
SWAPS = HostPath("/proc/swaps")
ZFS = HostPath("/sys/module/zfs")
POOLED = ("/sys/fs/btrfs", "/sys/fs/bcachefs")
"""File systems over several disks: each has a folder, whose `devices/` or `dev-0/block` names its disks."""

MULTIPATH = re.compile(r"nvme([0-9]+)c[0-9]+n([0-9]+)")
"""One of several paths to an NVMe namespace (nvme_core.multipath): the host mounts nvme0n1, which is below no PCI
function."""


class _Uses(msgspec.Struct, frozen=True):
    """The uses of disks on this host."""

    mounts: tuple[tuple[str, str], ...]
    """The device number and the source of each mount of the host: `259:1`, `/dev/nvme0n1p1`."""
    swaps: frozenset[str]
    """The words of the host's list of swap areas: `/dev/nvme0n1p3` is one."""
    pooled: frozenset[str]
    """The names of disks that belong to file systems over several disks."""
    has_zfs: bool
    opened: frozenset[int]
    """The numbers of the device nodes that processes have open."""


def read_disk_use(kernel: Kernel, address: PciAddress) -> str | None:
    """Return the use of a function's disks, or that it is unknown; None where no disk is in use."""
    names = attributes.names(kernel, BLOCKS)
    if isinstance(names, Unread):
        return f"may have a disk that is in use: {names.path} can't be read ({names.detail})"
    disks = sorted(_disks_of(kernel, address, names or ()))
    if not disks:
        return None
    uses = _read_uses(kernel)
    for name in disks:
        if isinstance(uses, Unread):
            return f"has the disk {name}, whose use is unknown ({uses.path}: {uses.detail})"
        if (use := _use_of(kernel, name, uses)) is not None:
            return f"has the disk {name}, {use}"
    return None


def _disks_of(kernel: Kernel, address: PciAddress, names: Sequence[str]) -> Iterator[str]:
    """Yield the disks and partitions below a function, over any bus in between: USB, Fibre Channel, NVMe."""
    for name in names:
        try:
            device = kernel.readlink(HostPath(f"{BLOCKS}/{name}"))
        except OSError as error:  # unknown: the disk may belong to this function
            if error.errno not in attributes.ABSENT:
                yield name
            continue
        if f"/{address}/" in device:
            yield name
            if (match := MULTIPATH.fullmatch(name)) is not None:
                head = f"nvme{match[1]}n{match[2]}"
                yield from (other for other in names if other == head or other.startswith(f"{head}p"))


def _read_uses(kernel: Kernel) -> _Uses | Unread:
    swaps = attributes.text(kernel, SWAPS, limit=1 << 16)
    match attributes.text(kernel, MOUNTS, limit=1 << 20), swaps, _pooled(kernel), read_open_nodes(kernel):
        case str(mounts), str() | None, frozenset() as pooled, tuple() as opened:
            return _Uses(
                tuple(_mounts(mounts)),
                frozenset((swaps or "").split()),
                pooled,
                attributes.names(kernel, ZFS) is not None,
                frozenset(file.device for file in opened),
            )
        case found:
            return next((part for part in found if isinstance(part, Unread)), Unread(MOUNTS, errno=errno.ENOENT))


def _mounts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the device number and the source of each line of mountinfo (proc_pid_mountinfo(5))."""
    for line in text.splitlines():
        fields, _, source = line.partition(" - ")
        numbers, sources = fields.split(" "), source.split(" ")
        if len(numbers) > 2 and len(sources) > 1:
            yield numbers[2], sources[1]


def _pooled(kernel: Kernel) -> frozenset[str] | Unread:
    found: set[str] = set()
    for root in POOLED:
        systems = attributes.names(kernel, HostPath(root))
        if isinstance(systems, Unread):
            return systems
        for system in systems or ():
            folder = f"{root}/{system}"
            members, others = (attributes.names(kernel, HostPath(path)) for path in (f"{folder}/devices", folder))
            if isinstance(members, Unread):
                return members
            if isinstance(others, Unread):
                return others
            found.update(members or ())
            blocks = (attributes.link_name(kernel, HostPath(f"{folder}/{other}/block")) for other in others or ())
            found.update(block for block in blocks if isinstance(block, str))
    return frozenset(found)


def _use_of(kernel: Kernel, name: str, uses: _Uses) -> str | None:
    path = HostPath(f"{BLOCKS}/{name}/dev")
    text, node = attributes.text(kernel, path), attributes.device_number(kernel, path)
    stacked = attributes.names(kernel, HostPath(f"{BLOCKS}/{name}/holders"))
    if not isinstance(node, int) or isinstance(stacked, Unread):
        return "whose use is unknown"
    evidence = (
        (any(number == text or source == f"/dev/{name}" for number, source in uses.mounts), "which is mounted"),
        (f"/dev/{name}" in uses.swaps, "on which the host swaps"),
        (bool(stacked), f"which {', '.join(stacked or ())} uses"),
        (name in uses.pooled, "which a file system over several disks uses"),
        (node in uses.opened, "which a process has open"),
        (uses.has_zfs, "which ZFS may be using"),
    )
    return next((use for holds, use in evidence if holds), None)


def read_host_uses(kernel: Kernel, functions: Iterable[PciFunction]) -> Mapping[PciAddress, str]:
    """Return the host's use of each function that it uses: `drives the console (fb0)`."""
    found: dict[PciAddress, str] = {}
    for function in functions:
        reader = _READERS.get(function.class_code >> 16)
        use = reader(kernel, function.address) if reader is not None else None
        if use is not None:
            found[function.address] = use
    return found


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
            is_up = True  # unknown: counts as in use
        if is_up:
            return f"is the network interface {name}, which is up"
    return None


_READERS = {DISPLAY: read_console, STORAGE: read_disk_use, NETWORK: _network, SERIAL_BUS: read_disk_use}

"""Reads PCI functions from `/sys/bus/pci/devices`.

It reads only links, ids, numbers and the first bytes of `config`. Reading `driver_override` or `uevent` hangs while
a process waits for the device to be unbound (seen on kernel 6.1), so no scan opens them.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, parse_iommu_group, parse_pci_address
from gpuvirt.facts.pci import (
    FunctionKind,
    PciFunction,
    ResetScope,
    Unread,
    kind_of,
    parse_bars,
)
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu
from gpuvirt.hardware.functions.modules import driver_of
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


T = TypeVar("T")


LINKS = ("driver", "iommu_group", "physfn", "vfio-dev")
"""The assumed entries of a function's folder that cannot be listed; each of them is still read."""

VF_LINK = re.compile(r"virtfn[0-9]{1,5}")

HEADER_BYTES = 12
"""The bytes of configuration space up to the class code (PCI Local Bus 3.0, 6.1)."""

NO_ANSWER = b"\xff" * 8
"""The first bytes of configuration space of a device that no longer responds: all ones.

A working VF has ones only in place of its vendor and device ids (PCI Express 5.0, 9.3.4.1); its `command` and `status`
follow.
"""


def attribute(address: PciAddress, name: str) -> HostPath:
    """Return the path of a function's attribute."""
    return device_path(address, name)


def read_group(kernel: Kernel, address: PciAddress) -> IommuGroup | Unread | None:
    """Return the current IOMMU group of a function."""
    path = device_path(address, "iommu_group")
    name = attributes.link_name(kernel, path)
    return attributes.understood(path, name, parse_iommu_group) if isinstance(name, str) else name


def read_root(kernel: Kernel, address: PciAddress) -> str | Unread | None:
    """Return the PCI host bridge of a function, `pci0000:16`; None where its link does not show it."""
    path = device_path(address)
    try:
        target = kernel.readlink(path).split("/")
    except OSError as error:
        return Unread(path, errno=error.errno)
    return next((part for part in target if part.startswith("pci")), None)


def read_id(kernel: Kernel, address: PciAddress) -> PciId | Unread | None:
    """Return the current vendor and device id of a function."""
    return _read_pair(kernel, attribute(address, "vendor"), attribute(address, "device"))


def _read_pair(kernel: Kernel, vendor_path: HostPath, device_path: HostPath) -> PciId | Unread | None:
    vendor = attributes.parsed(kernel, vendor_path, attributes.pci_id)
    if not isinstance(vendor, int):
        return vendor
    device = attributes.parsed(kernel, device_path, attributes.pci_id)
    return PciId(vendor, device) if isinstance(device, int) else device


def read_function(kernel: Kernel, address: PciAddress, before: PciFunction | None) -> PciFunction | MalformedEntry:
    """Return a function, or the reason why the address has none.

    `before` is the same function as of the last scan. An attribute that cannot be read is taken from there and listed
    as unread, except the driver and the group, on which every decision depends.
    """
    reading = FunctionReading(kernel, address, before)
    found = reading.identity()
    return found if isinstance(found, MalformedEntry) else reading.function(*found)


def with_cdevs(kernel: Kernel, function: PciFunction) -> PciFunction:
    """Return a function with its current own nodes; nodes that cannot be read stay the same and are listed as
    unread."""
    found = iommu.read_cdevs(kernel, device_path(function.address))
    if not isinstance(found, Unread):
        return function if found == function.cdevs else replace(function, cdevs=found)
    return function if found in function.unread else replace(function, unread=(*function.unread, found))


def read_reset(kernel: Kernel, address: PciAddress) -> ResetScope | None:
    """Return how the kernel can reset a function, None where that is unknown.

    `reset_method` (since 5.15) lists the enabled methods. It is empty where an administrator has disabled all of them;
    it and `reset` are absent where the function has no method. Reading it takes no lock in the kernel. A reset of the
    bus does not depend on it.
    """
    methods = attributes.text(kernel, attribute(address, "reset_method"))
    if isinstance(methods, Unread):
        return None
    has_method = iommu.exists(kernel, attribute(address, "reset")) if methods is None else bool(methods)
    if isinstance(has_method, Unread):
        return None
    if has_method:
        return ResetScope.FUNCTION
    try:
        parent = kernel.readlink(device_path(address)).rpartition("/")[0].rpartition("/")[2]
    except OSError:
        return None  # unknown: None, no scope
    if parent.startswith("pci"):
        return ResetScope.NONE
    return ResetScope.SHARED_BUS if methods is None else ResetScope.BUS


class FunctionReading:
    """Reads one function and collects the attributes that could not be read."""

    def __init__(self, kernel: Kernel, address: PciAddress, before: PciFunction | None) -> None:
        self.kernel = kernel
        self.address = address
        self.before = before
        self.unread: list[Unread] = []
        self._header: bytes | OSError | None = None

    def note(self, *found: object) -> None:
        """Keep those of some values that could not be read."""
        self.unread += (value for value in found if isinstance(value, Unread))

    def header(self) -> bytes | OSError:
        """Return the first bytes of configuration space, or the error of reading them; they are read once."""
        if self._header is None:
            try:
                self._header = self.kernel.read(device_path(self.address, "config"), limit=HEADER_BYTES)
            except OSError as error:
                self._header = error
        return self._header

    def identity(self) -> tuple[PciId, int] | MalformedEntry:
        """Return the id and the class code of the function, or the reason why the address has none."""
        found_id = read_id(self.kernel, self.address)
        found_class = attributes.parsed(self.kernel, attribute(self.address, "class"), attributes.pci_class)
        if isinstance(found_id, PciId) and isinstance(found_class, int):
            return found_id, found_class
        problem = found_class if isinstance(found_id, PciId) else found_id
        if not isinstance(problem, Unread):
            reason = "disappeared while it was read, or is not a PCI function"
            return MalformedEntry(device_path(self.address), reason)
        if self.before is None:
            return MalformedEntry(problem.path, f"cannot be read: {problem.detail}")
        self.unread.append(problem)
        return self.before.id, self.before.class_code

    def function(self, function_id: PciId, class_code: int) -> PciFunction:
        """Read all attributes of a function."""
        folder, before = device_path(self.address), self.before
        entries = self.or_before(attributes.names(self.kernel, folder), None) or LINKS
        driver = driver_of(self.kernel, self.address) if "driver" in entries else None
        group = read_group(self.kernel, self.address) if "iommu_group" in entries else None
        self.unread += (found for found in (driver, group) if isinstance(found, Unread))
        if kind_of(class_code, function_id.vendor) in _NOT_OFFERED:
            # Such a function matters only as a member of a GPU's IOMMU group.
            return PciFunction(
                address=self.address,
                id=function_id,
                class_code=class_code,
                driver=driver,
                iommu_group=group,
                cdevs=self.cdevs(entries),
                unread=tuple(self.unread),
            )
        found = PciFunction(
            address=self.address,
            id=function_id,
            class_code=class_code,
            subsystem=self.or_before(
                _read_pair(
                    self.kernel,
                    attribute(self.address, "subsystem_vendor"),
                    attribute(self.address, "subsystem_device"),
                ),
                before.subsystem if before else None,
            ),
            revision=self.or_before(
                self._number("revision", attributes.pci_revision), before.revision if before else None
            ),
            driver=driver,
            iommu_group=group,
            numa_node=self.or_before(self._numa_node(), before.numa_node if before else None),
            cdevs=self.cdevs(entries),
            physfn=self.physfn(entries),
            virtfns=self.vfs(entries),
            sriov_total_vfs=self.or_before(self._number("sriov_totalvfs", attributes.number), None),
            fell_off_bus=self.fell_off_bus(),
        )
        if found.kind is FunctionKind.GPU and class_code >> 16 == DISPLAY and "boot_vga" in entries:
            found = replace(found, console=read_console(self.kernel, self.address))
        is_bound_gpu = found.kind is FunctionKind.GPU and found.physfn is None and isinstance(driver, str)
        if found.kind is FunctionKind.GPU and found.physfn is None:
            found = replace(found, bars_unassigned=self.bars_unassigned())
        has_tenants = found.on_vfio or is_bound_gpu
        found = replace(found, unread=tuple(self.unread))
        return replace(found, reset=read_reset(self.kernel, self.address)) if has_tenants else found

    def or_before(self, found: T | Unread, before: T) -> T:
        """Return a value that was read; `before` if it could not be read."""
        if isinstance(found, Unread):
            self.unread.append(found)
            return before
        return found

    def _number(self, name: str, parse: Callable[[str], int]) -> int | Unread | None:
        return attributes.parsed(self.kernel, attribute(self.address, name), parse)

    def _numa_node(self) -> int | Unread | None:
        """Read the NUMA node; the kernel writes -1 where the firmware specifies no node."""
        node = self._number("numa_node", attributes.numa_node)
        return None if isinstance(node, int) and node < 0 else node

    def read_address(self, name: str) -> PciAddress | Unread | None:
        """Return the function that a link in the function's folder leads to."""
        path = device_path(self.address, name)
        target = attributes.link_name(self.kernel, path)
        return attributes.understood(path, target, parse_pci_address) if isinstance(target, str) else target

    def physfn(self, entries: Sequence[str]) -> PciAddress | None:
        """Return the PF of a VF."""
        before = self.before.physfn if self.before else None
        return self.or_before(self.read_address("physfn"), before) if "physfn" in entries else None

    def vfs(self, entries: Sequence[str]) -> tuple[PciAddress, ...]:
        """Return the VFs by number (`virtfn2` before `virtfn10`); a VF that cannot be read stays the same."""
        before = self.before.virtfns if self.before else ()
        if entries is LINKS:  # the folder cannot be listed, and is in `unread`
            return before
        links = [name for name in entries if VF_LINK.fullmatch(name)]
        found = [self.read_address(name) for name in sorted(links, key=lambda name: int(name[6:]))]
        self.unread += (vf for vf in found if isinstance(vf, Unread))
        known = tuple(vf for vf in found if isinstance(vf, str))
        unread = len(known) < len([vf for vf in found if vf is not None])
        return tuple(dict.fromkeys((*known, *before))) if unread else known

    def cdevs(self, entries: Sequence[str]) -> tuple[str, ...]:
        """Return the function's own nodes."""
        before = self.before.cdevs if self.before else ()
        return (
            self.or_before(iommu.read_cdevs(self.kernel, device_path(self.address)), before)
            if "vfio-dev" in entries
            else ()
        )

    def bars_unassigned(self) -> tuple[int, ...]:
        """Return the memory BARs to which neither the firmware nor the kernel has given an address."""
        text = self.or_before(attributes.text(self.kernel, attribute(self.address, "resource")), None)
        sizes = parse_bars(text) if text is not None else None
        if sizes is None:  # unknown: as before; doctor names a file that can't be read
            return self.before.bars_unassigned if self.before is not None else ()
        return tuple(number for number, size in sizes.items() if size is None)

    def fell_off_bus(self) -> bool:
        """Return whether configuration space has only ones."""
        header = self.header()
        if not isinstance(header, OSError):
            return header.startswith(NO_ANSWER)
        if header.errno in attributes.ABSENT:
            return False
        self.unread.append(Unread(attribute(self.address, "config"), errno=header.errno))
        return self.before is not None and self.before.fell_off_bus


_NOT_OFFERED = frozenset({FunctionKind.OTHER, FunctionKind.BRIDGE})

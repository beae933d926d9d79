"""PCI functions, read from `/sys/bus/pci/devices`.

Only links, ids, numbers and the first bytes of `config` are read. `driver_override` and `uevent` hang while somebody
waits for the device to be unbound (seen on kernel 6.1), so no scan opens them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, parse_iommu_group, parse_pci_address
from gpuvirt.facts.pci import (
    HARMLESS_ATTRIBUTES,
    VFIO_DRIVERS,
    FunctionKind,
    PciFunction,
    ResetScope,
    Unread,
    kind_of,
)
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware import attributes, iommu
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

T = TypeVar("T")


LINKS = ("driver", "iommu_group", "physfn", "vfio-dev")
"""What a function's folder is taken to hold where it can't be listed; each is still read."""

VF_LINK = re.compile(r"virtfn[0-9]{1,5}")

NO_ANSWER = b"\xff" * 8
"""How configuration space begins for a device that no longer answers: all ones.

A VF answers with ones in the place of its vendor and device ids alone (PCI Express 5.0, 9.3.4.1): `command` and
`status` follow.
"""


def attribute(address: PciAddress, name: str) -> HostPath:
    """Return the path of a function's attribute."""
    return device_path(address, name)


def read_driver(kernel: Kernel, address: PciAddress) -> str | Unread | None:
    """Return the driver that a function is bound to now."""
    return attributes.link_name(kernel, attribute(address, "driver"))


def read_group(kernel: Kernel, address: PciAddress) -> IommuGroup | Unread | None:
    """Return the IOMMU group that a function is in now."""
    path = attribute(address, "iommu_group")
    name = attributes.link_name(kernel, path)
    return attributes.understood(path, name, parse_iommu_group) if isinstance(name, str) else name


def read_id(kernel: Kernel, address: PciAddress) -> PciId | Unread | None:
    """Return what a function is now."""
    return _read_pair(kernel, attribute(address, "vendor"), attribute(address, "device"))


def _read_pair(kernel: Kernel, vendor_path: HostPath, device_path: HostPath) -> PciId | Unread | None:
    vendor = attributes.parsed(kernel, vendor_path, attributes.pci_id)
    if not isinstance(vendor, int):
        return vendor
    device = attributes.parsed(kernel, device_path, attributes.pci_id)
    return PciId(vendor, device) if isinstance(device, int) else device


def read_function(
    kernel: Kernel, address: PciAddress, before: PciFunction | None, *, again: bool = False
) -> PciFunction | MalformedEntry:
    """Return a function, or why there is none at that address.

    `before` is the same function as it was seen last: what can't be read now is taken from there, and listed as unread.
    The driver and the group are not: whether they are still the same is what everything hangs on. What is harmless is
    not read `again`.
    """
    if again and before is not None and _is_as_before(kernel, before):
        return _Reading(kernel, address, before).again(before.id, before.class_code)
    found_id = read_id(kernel, address)
    found_class = attributes.parsed(kernel, attribute(address, "class"), attributes.pci_class)
    reading = _Reading(kernel, address, before)
    read = reading.again if again else reading.function
    if isinstance(found_id, PciId) and isinstance(found_class, int):
        return read(found_id, found_class)
    problem = found_class if isinstance(found_id, PciId) else found_id
    if not isinstance(problem, Unread):
        return MalformedEntry(device_path(address), "went away while it was read, or is no PCI function")
    if before is None:
        return MalformedEntry(problem.path, f"can't be understood: {problem.said}")
    reading.unread.append(problem)
    return read(before.id, before.class_code)


def _is_as_before(kernel: Kernel, before: PciFunction) -> bool:
    """Return whether a function's ids read as those of before, as the kernel writes them."""
    here, vendor, device = device_path(before.address), before.id.vendor, before.id.device
    try:
        return (
            kernel.read(HostPath(f"{here}/vendor")) == b"0x%04x\n" % vendor
            and kernel.read(HostPath(f"{here}/device")) == b"0x%04x\n" % device
            and kernel.read(HostPath(f"{here}/class")) == b"0x%06x\n" % before.class_code
        )
    except OSError:
        return False


def read_again(kernel: Kernel, before: PciFunction, *, reset: bool) -> PciFunction | MalformedEntry:
    """Return a function that was read a moment ago as it is now, or why there is none at its address any more.

    Harmless attributes stay as they were, and so does what can reset it where `reset` does not ask for that.
    """
    found = read_function(kernel, before.address, before, again=True)
    if isinstance(found, MalformedEntry) or not reset:
        return found
    return replace(found, reset=read_reset(kernel, before.address))


def with_cdevs(kernel: Kernel, function: PciFunction) -> PciFunction:
    """Return a function with its own nodes as they are now; where these can't be read, they stay and are unread."""
    found = iommu.read_cdevs(kernel, device_path(function.address))
    if not isinstance(found, Unread):
        return function if found == function.cdevs else replace(function, cdevs=found)
    return function if found in function.unread else replace(function, unread=(*function.unread, found))


def read_reset(kernel: Kernel, address: PciAddress) -> ResetScope | None:
    """Return what the kernel can reset a function with, None where that can't be told.

    `reset_method` (since 5.15) lists the ways in use: it is empty where somebody has disabled them all, and absent, as
    `reset` is, where there is none. Reading it takes no lock in the kernel. Resets of the bus don't depend on it.
    """
    methods = attributes.text(kernel, attribute(address, "reset_method"))
    there = iommu.exists(kernel, attribute(address, "reset")) if methods is None else bool(methods)
    if isinstance(methods, Unread) or isinstance(there, Unread):
        return None
    if there:
        return ResetScope.FUNCTION
    try:
        parent = kernel.readlink(device_path(address)).rpartition("/")[0].rpartition("/")[2]
    except OSError:
        return None
    if parent.startswith("pci"):
        return ResetScope.NONE
    return ResetScope.SHARED_BUS if methods is None else ResetScope.BUS


def _changeable(function: PciFunction) -> tuple[object, ...]:
    """Return what is read again of a function."""
    identity = function.id, function.class_code, function.driver, function.iommu_group, function.cdevs
    return *identity, function.physfn, function.virtfns, function.fell_off_bus, function.unread


class _Reading:
    """One function being read; what could not be read is collected beside what could."""

    def __init__(self, kernel: Kernel, address: PciAddress, before: PciFunction | None) -> None:
        self.kernel = kernel
        self.address = address
        self.before = before
        self.unread: list[Unread] = []

    def again(self, function_id: PciId, class_code: int) -> PciFunction:
        """Read what can have changed of a function, and tells whether it can be given to a VM."""
        if (before := self.before) is None:
            return self.function(function_id, class_code)
        driver, group = read_driver(self.kernel, self.address), read_group(self.kernel, self.address)
        self.unread += (found for found in (driver, group) if isinstance(found, Unread))
        cdevs = self._cdevs(("vfio-dev",)) if before.cdevs or driver not in VFIO_DRIVERS else ()
        physfn = self._physfn(("physfn",)) if before.physfn is not None else None
        virtfns = self._vfs_again(before) if before.sriov_total_vfs else before.virtfns
        fallen = self._fell_off_bus()
        self.unread += [one for one in before.unread if one.path.rpartition("/")[2] in HARMLESS_ATTRIBUTES]
        unread = tuple(self.unread)
        found = function_id, class_code, driver, group, cdevs, physfn, virtfns, fallen, unread
        if found == _changeable(before):  # to make an equal one takes as long as two reads
            return before
        return replace(
            before,
            id=function_id,
            class_code=class_code,
            driver=driver,
            iommu_group=group,
            cdevs=cdevs,
            physfn=physfn,
            virtfns=virtfns,
            fell_off_bus=fallen,
            unread=unread,
        )

    def _vfs_again(self, before: PciFunction) -> tuple[PciAddress, ...]:
        """Return the VFs: all are switched on and off at once, so that the first one tells of all."""
        first = self._told(self._address("virtfn0"), before.virtfns[0] if before.virtfns else None)
        if (first is not None) == bool(before.virtfns):
            return before.virtfns
        entries = self._told(attributes.names(self.kernel, device_path(self.address)), None)
        return self._vfs(entries or LINKS)

    def function(self, function_id: PciId, class_code: int) -> PciFunction:
        folder, before = device_path(self.address), self.before
        entries = self._told(attributes.names(self.kernel, folder), None) or LINKS
        driver = read_driver(self.kernel, self.address) if "driver" in entries else None
        group = read_group(self.kernel, self.address) if "iommu_group" in entries else None
        self.unread += (found for found in (driver, group) if isinstance(found, Unread))
        if kind_of(class_code, function_id.vendor) in {FunctionKind.OTHER, FunctionKind.BRIDGE}:
            # Such a function matters only as a member of somebody's group.
            return PciFunction(
                address=self.address,
                id=function_id,
                class_code=class_code,
                driver=driver,
                iommu_group=group,
                cdevs=self._cdevs(entries),
                unread=tuple(self.unread),
            )
        found = PciFunction(
            address=self.address,
            id=function_id,
            class_code=class_code,
            subsystem=self._told(self._subsystem(), before.subsystem if before else None),
            revision=self._told(self._number("revision", attributes.pci_revision), before.revision if before else None),
            driver=driver,
            iommu_group=group,
            numa_node=self._told(self._numa_node(), before.numa_node if before else None),
            cdevs=self._cdevs(entries),
            physfn=self._physfn(entries),
            virtfns=self._vfs(entries),
            sriov_total_vfs=self._told(self._number("sriov_totalvfs", attributes.number), None),
            fell_off_bus=self._fell_off_bus(),
            unread=tuple(self.unread),
        )
        whole = found.on_vfio and found.physfn is None
        return replace(found, reset=read_reset(self.kernel, self.address)) if whole else found

    def _told(self, found: T | Unread, otherwise: T) -> T:
        if isinstance(found, Unread):
            self.unread.append(found)
            return otherwise
        return found

    def _number(self, name: str, parse: Callable[[str], int]) -> int | Unread | None:
        return attributes.parsed(self.kernel, attribute(self.address, name), parse)

    def _numa_node(self) -> int | Unread | None:
        """Read the NUMA node; the kernel writes -1 where the firmware names none."""
        node = self._number("numa_node", attributes.numa_node)
        return None if isinstance(node, int) and node < 0 else node

    def _subsystem(self) -> PciId | Unread | None:
        return _read_pair(
            self.kernel, attribute(self.address, "subsystem_vendor"), attribute(self.address, "subsystem_device")
        )

    def _address(self, name: str) -> PciAddress | Unread | None:
        path = attribute(self.address, name)
        target = attributes.link_name(self.kernel, path)
        return attributes.understood(path, target, parse_pci_address) if isinstance(target, str) else target

    def _physfn(self, entries: Sequence[str]) -> PciAddress | None:
        before = self.before.physfn if self.before else None
        return self._told(self._address("physfn"), before) if "physfn" in entries else None

    def _vfs(self, entries: Sequence[str]) -> tuple[PciAddress, ...]:
        """Return the VFs in the order of their numbers (`virtfn2` before `virtfn10`); an unread one is as before."""
        before = self.before.virtfns if self.before else ()
        if entries is LINKS:  # the folder can't be listed, and that is said
            return before
        links = [name for name in entries if VF_LINK.fullmatch(name)]
        found = [self._address(name) for name in sorted(links, key=lambda name: int(name[6:]))]
        self.unread += (one for one in found if isinstance(one, Unread))
        known = tuple(one for one in found if isinstance(one, str))
        unread = len(known) < len([one for one in found if one is not None])
        return tuple(dict.fromkeys((*known, *before))) if unread else known

    def _cdevs(self, entries: Sequence[str]) -> tuple[str, ...]:
        before = self.before.cdevs if self.before else ()
        return (
            self._told(iommu.read_cdevs(self.kernel, device_path(self.address)), before)
            if "vfio-dev" in entries
            else ()
        )

    def _fell_off_bus(self) -> bool:
        path = attribute(self.address, "config")
        try:
            return self.kernel.read(path, limit=len(NO_ANSWER)) == NO_ANSWER
        except OSError as error:
            if error.errno in attributes.ABSENT:
                return False
            self.unread.append(Unread(path, errno=error.errno))
            return self.before is not None and self.before.fell_off_bus

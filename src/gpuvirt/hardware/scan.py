"""Scans a host: calls every reader and collects the results as Facts.

A scan is complete, brief, or of some functions. A brief scan reads again the functions that can fail without a uevent
(GPUs and the members of their groups), the vGPUs and the nodes; it takes the other functions from the scan before. A
scan of some functions reads those, and which vGPUs exist. Every scan reads new functions.
"""

import errno
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import BootId, PciAddress, parse_pci_address
from gpuvirt.facts.pci import VENDOR_VFIO_DRIVER, FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, MalformedEntry, Platform
from gpuvirt.facts.sysfs import NVIDIA_VERSION, PCI_DEVICES, VGPU_MANAGER, device_path
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu, pci
from gpuvirt.hardware.functions.deviceids import read_device_ids
from gpuvirt.hardware.usage.users import cdevs_of, read_users
from gpuvirt.hardware.vgpu.registry import SCANNED
from gpuvirt.paths import HostPath

T = TypeVar("T")

BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")
CGROUP_V2 = HostPath("/sys/fs/cgroup/cgroup.controllers")
"""A file of each cgroup of version 2, and of none of version 1 (cgroups(7))."""


def scan(kernel: Kernel, before: Facts | None = None, *, brief: bool = False) -> Facts:
    """Return the current facts of the host; folders that cannot be listed are taken from `before`."""
    taken = _unchanging(before.functions) if brief and before is not None else {}
    return _scanned(_Scan(kernel, before or Facts()), taken, brief=brief and before is not None)


def scan_some(kernel: Kernel, some: Collection[PciAddress], before: Facts) -> Facts:
    """Return the facts of the host with `some` of its functions read again, without using `before` for these.

    A function of `some` that cannot be read is left out.
    """
    others = _without(before, some)
    return _scanned(_Scan(kernel, others), others.functions, brief=True)


def scan_functions(
    kernel: Kernel, before: Facts, some: Collection[PciAddress] | None = None
) -> Mapping[PciAddress, PciFunction]:
    """Return the functions of the host, without their vGPUs. Those that are in `before` and not in `some` aren't read.

    Without `some`, all are read.
    """
    others = _without(before, before.functions if some is None else some)
    return _Scan(kernel, others).functions(others.functions)


def _without(facts: Facts, some: Collection[PciAddress]) -> Facts:
    """Return the facts of all functions but `some`."""
    return replace(
        facts,
        functions={address: function for address, function in facts.functions.items() if address not in some},
        vgpu_hosts={gpu: host for gpu, host in facts.vgpu_hosts.items() if gpu not in some},
    )


def _scanned(scanning: "_Scan", taken: Mapping[PciAddress, PciFunction], *, brief: bool) -> Facts:
    """Return the current facts of the host without reading the functions in `taken`."""
    kernel = scanning.kernel
    functions = scanning.functions(taken)
    before = scanning.before.platform.nvidia_version
    nvidia_version = scanning.or_before(attributes.text(kernel, NVIDIA_VERSION), before)
    vgpu_hosts = scanning.vgpu_hosts(functions, brief=brief, same_driver=nvidia_version == before)
    functions = scanning.with_new_nodes(functions, vgpu_hosts.values())
    group_nodes = scanning.or_before(iommu.read_group_nodes(kernel), scanning.before.group_nodes)
    cdev_nodes = scanning.or_before(iommu.read_cdev_nodes(kernel), scanning.before.cdev_nodes)
    return Facts(
        platform=scanning.platform(nvidia_version),
        functions=functions,
        vgpu_hosts=vgpu_hosts,
        group_nodes=group_nodes,
        cdev_nodes=cdev_nodes,
        users=scanning.before.users,
        users_of_lost_nodes=scanning.before.users_of_lost_nodes,
        device_ids=scanning.before.device_ids.of(functions),  # a GPU may have been unplugged since they were read
        malformed_entries=tuple(scanning.malformed_entries),
        unread=tuple(scanning.unread),
    )


def with_users(kernel: Kernel, facts: Facts) -> Facts:
    """Return `facts` with the processes that have VFIO devices open; this walks through all of `/proc`."""
    found = read_users(kernel, cdevs_of(facts.functions.values()))
    if isinstance(found, Unread):
        return replace(facts, users=None, users_of_lost_nodes=())
    return replace(facts, users=found.by_group, users_of_lost_nodes=found.of_lost_nodes)


def with_device_ids(kernel: Kernel, facts: Facts) -> Facts:
    """Return `facts` with the ids by which other programs name the GPUs."""
    return replace(facts, device_ids=read_device_ids(kernel, facts.functions.values()))


class _Scan(msgspec.Struct):
    kernel: Kernel
    before: Facts
    malformed_entries: list[MalformedEntry] = msgspec.field(default_factory=list)
    unread: list[Unread] = msgspec.field(default_factory=list)

    def or_before(self, found: T | Unread, before: T) -> T:
        if isinstance(found, Unread):
            self.unread.append(found)
            return before
        return found

    def functions(self, taken: Mapping[PciAddress, PciFunction]) -> Mapping[PciAddress, PciFunction]:
        names = attributes.names(self.kernel, PCI_DEVICES)
        if names is None and self.before.functions:
            names = Unread(PCI_DEVICES, errno=errno.ENOENT)
        if isinstance(names, Unread):
            self.unread.append(names)
            return self.before.functions
        found: dict[PciAddress, PciFunction] = {}
        for name in names or ():
            try:
                address = parse_pci_address(name)
            except InvalidIdError as error:
                self.malformed_entries.append(MalformedEntry(device_path(name), str(error)))
                continue
            read = taken.get(address) or pci.read_function(self.kernel, address, self.before.functions.get(address))
            if isinstance(read, MalformedEntry):
                self.malformed_entries.append(read)
            else:
                found[address] = read
        return found

    def vgpu_hosts(
        self, functions: Mapping[PciAddress, PciFunction], *, brief: bool, same_driver: bool
    ) -> Mapping[PciAddress, VgpuHost]:
        found: dict[PciAddress, VgpuHost] = {}
        for backend in SCANNED:
            hosts = self.before.vgpu_hosts
            before = {gpu: host for gpu, host in hosts.items() if host.framework is backend.framework}
            # another version of the driver may give the ids to other types
            known = before if same_driver else {}
            probe = backend.probe(self.kernel, functions, known, brief=brief)
            if isinstance(probe, Unread):
                self.unread.append(probe)
                found |= before
            else:
                found |= probe.hosts
                self.malformed_entries += probe.malformed_entries
        return found

    def with_new_nodes(
        self, functions: Mapping[PciAddress, PciFunction], vgpu_hosts: Iterable[VgpuHost]
    ) -> Mapping[PciAddress, PciFunction]:
        """Return the functions; the own nodes of those that may have become VFIO devices are read again.

        The node of a vGPU appears and disappears while its VF stays on the same driver. It may have been created since
        the function was read, or since the scan from which the function was taken. So may the node of a function that
        was bound while it was read.
        """
        live = {vgpu.parent for host in vgpu_hosts if host.framework is Framework.VENDOR_VFIO for vgpu in host.live}
        inconsistent = {
            address
            for address, function in functions.items()
            if (function.cdevs and function.driver == VENDOR_VFIO_DRIVER) or (function.on_vfio and not function.cdevs)
        }
        read_again = {address: pci.with_cdevs(self.kernel, functions[address]) for address in live | inconsistent}
        return {**functions, **read_again}

    def platform(self, nvidia_version: str | None) -> Platform:
        boot_id = self.or_before(attributes.text(self.kernel, BOOT_ID), self.before.platform.boot_id)
        before = self.before.platform
        regions, unread = iommu.read_regions(self.kernel, before.egm)
        self.unread += unread
        return Platform(
            boot_id=BootId(boot_id) if boot_id else None,
            nvidia_version=nvidia_version,
            vgpu_manager=iommu.exists(self.kernel, VGPU_MANAGER),
            iommufd=self.or_before(iommu.has_iommufd(self.kernel), before.iommufd),
            vfio_container=self.or_before(iommu.exists(self.kernel, iommu.CONTAINER), before.vfio_container),
            egm=regions,
            # It stays while a host runs.
            cgroup_v2=before.cgroup_v2 or self.or_before(iommu.exists(self.kernel, CGROUP_V2), before.cgroup_v2),
        )


def _unchanging(functions: Mapping[PciAddress, PciFunction]) -> Mapping[PciAddress, PciFunction]:
    """Return the functions that were read completely and change only with a uevent.

    They are of no kind that is offered, and not in the group of such a function. A VF without a VFIO driver fails
    together with its GPU.
    """
    groups = {function.iommu_group for function in functions.values() if _matters(function)}
    return {
        address: function
        for address, function in functions.items()
        if not _matters(function) and function.iommu_group not in groups and not function.unread
    }


def _matters(function: PciFunction) -> bool:
    if function.physfn is not None and not function.on_vfio:
        return False
    return function.kind not in {FunctionKind.OTHER, FunctionKind.BRIDGE}

"""One look at a host: every reader in turn, and their findings as Facts.

A look is whole, brief or at some functions. A brief one reads again what can fall ill (GPUs and the members of their
groups, vGPUs, nodes) and takes the other functions as the look before saw them; one at some functions reads those, and
which vGPUs there are. A function that is new is always read.
"""

import errno
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import BootId, PciAddress, parse_pci_address
from gpuvirt.facts.pci import VENDOR_VFIO_DRIVER, FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, MalformedEntry, Platform
from gpuvirt.facts.sysfs import PCI_DEVICES, device_path
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.hardware import attributes, egm, iommu, pci
from gpuvirt.hardware.deviceids import read_device_ids
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.users import cdevs_of, read_users
from gpuvirt.hardware.vgpu.registry import LOOKED_FOR
from gpuvirt.paths import HostPath

T = TypeVar("T")

BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")


def scan(kernel: Kernel, before: Facts | None = None, *, brief: bool = False) -> Facts:
    """Return what the host shows now; what can't be listed is as `before` saw it."""
    taken = _dull(before.functions) if brief and before is not None else {}
    return _scanned(_Look(kernel, before or Facts()), taken, brief=brief and before is not None)


def scan_some(kernel: Kernel, some: Collection[PciAddress], before: Facts) -> Facts:
    """Return the host with `some` of its functions as they show now, whatever `before` saw of these.

    One of them that can't be read is left out, as if there had been no look before.
    """
    others = replace(
        before,
        functions={one: function for one, function in before.functions.items() if one not in some},
        vgpu_hosts={gpu: host for gpu, host in before.vgpu_hosts.items() if gpu not in some},
    )
    return _scanned(_Look(kernel, others), others.functions, brief=True)


def _scanned(look: "_Look", taken: Mapping[PciAddress, PciFunction], *, brief: bool) -> Facts:
    """Return what the host shows now; the functions that are `taken` are not read."""
    kernel = look.kernel
    functions = look.functions(taken)
    vgpu_hosts = look.vgpu_hosts(functions, brief=brief)
    functions = look.carriers(functions, vgpu_hosts.values())
    group_nodes = look.told(iommu.read_group_nodes(kernel), look.before.group_nodes)
    cdev_nodes = look.told(iommu.read_cdev_nodes(kernel), look.before.cdev_nodes)
    return Facts(
        platform=look.platform(),
        functions=functions,
        vgpu_hosts=vgpu_hosts,
        group_nodes=group_nodes,
        cdev_nodes=cdev_nodes,
        users=look.before.users,
        users_of_lost_nodes=look.before.users_of_lost_nodes,
        device_ids=look.before.device_ids,
        malformed_entries=tuple(look.malformed_entries),
        unread=tuple(look.unread),
    )


def with_users(kernel: Kernel, facts: Facts) -> Facts:
    """Return `facts` with the processes that have VFIO devices open now; this walks all of `/proc`."""
    found = read_users(kernel, cdevs_of(facts.functions.values()))
    if isinstance(found, Unread):
        return replace(facts, users=None, users_of_lost_nodes=())
    return replace(facts, users=found.by_group, users_of_lost_nodes=found.of_lost_nodes)


def with_device_ids(kernel: Kernel, facts: Facts) -> Facts:
    """Return `facts` with what other programs call the GPUs now."""
    return replace(facts, device_ids=read_device_ids(kernel, facts.functions.values()))


@dataclass(slots=True)
class _Look:
    kernel: Kernel
    before: Facts
    malformed_entries: list[MalformedEntry] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def told(self, found: T | Unread, before: T) -> T:
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

    def vgpu_hosts(self, functions: Mapping[PciAddress, PciFunction], *, brief: bool) -> Mapping[PciAddress, VgpuHost]:
        found: dict[PciAddress, VgpuHost] = {}
        for backend in LOOKED_FOR:
            hosts = self.before.vgpu_hosts
            before = {gpu: host for gpu, host in hosts.items() if host.framework is backend.framework}
            probe = backend.probe(self.kernel, functions, before, brief=brief)
            if isinstance(probe, Unread):
                self.unread.append(probe)
                found |= before
            else:
                found |= probe.hosts
                self.malformed_entries += probe.malformed_entries
        return found

    def carriers(
        self, functions: Mapping[PciAddress, PciFunction], vgpu_hosts: Iterable[VgpuHost]
    ) -> Mapping[PciAddress, PciFunction]:
        """Return the functions, those that may be VFIO devices by now with their nodes as they are now.

        The node of a vGPU comes and goes while its VF stays on one driver: it may have been created since the function
        was read, or since the look from which the function was taken. So may the node of a function that was bound
        while it was read.
        """
        live = {vgpu.slot for host in vgpu_hosts if host.framework is Framework.VENDOR_VFIO for vgpu in host.live}
        torn = {
            one
            for one, function in functions.items()
            if (function.cdevs and function.driver == VENDOR_VFIO_DRIVER) or (function.on_vfio and not function.cdevs)
        }
        return {**functions, **{one: pci.with_cdevs(self.kernel, functions[one]) for one in live | torn}}

    def platform(self) -> Platform:
        boot_id = self.told(attributes.text(self.kernel, BOOT_ID), self.before.platform.boot_id)
        before = self.before.platform
        regions, unread = egm.read_regions(self.kernel, before.egm)
        self.unread += unread
        return Platform(
            boot_id=BootId(boot_id) if boot_id else None,
            iommufd=self.told(iommu.has_iommufd(self.kernel), before.iommufd),
            vfio_container=self.told(iommu.exists(self.kernel, iommu.CONTAINER), before.vfio_container),
            egm=regions,
        )


def _dull(functions: Mapping[PciAddress, PciFunction]) -> Mapping[PciAddress, PciFunction]:
    """Return the functions that can't fall ill without a uevent, and were read whole.

    They are of no kind that we offer nor in the group of one; a VF that no VFIO driver has falls ill with its GPU.
    """
    bright = {function.iommu_group for function in functions.values() if _matters(function)}
    return {
        address: function
        for address, function in functions.items()
        if not _matters(function) and function.iommu_group not in bright and not function.unread
    }


def _matters(function: PciFunction) -> bool:
    if function.physfn is not None and not function.on_vfio:
        return False
    return function.kind not in {FunctionKind.OTHER, FunctionKind.BRIDGE}

"""Reads a few devices again just before they are allocated: what the last look at the host saw is a moment old.

The result is a small, fresh set of facts, for the same judgement as after each look. Whether a process has a device
open is told by opening its IOMMU group, or by one walk through all processes for all devices that need it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.pci import GROUP_FRIENDLY_DRIVERS, FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, MalformedEntry, User
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware import iommu, pci
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.users import cdevs_of, read_users_of
from gpuvirt.hardware.vgpu import mdev, vendor_vfio

Members = Mapping[IommuGroup, Sequence[str] | Unread | None]


@dataclass(frozen=True, slots=True)
class AskedDevice:
    """A device that is read again."""

    carrier: PciAddress
    """The function that a VM gets, or that its vGPU is created on."""
    gpu: PciAddress
    vgpu: VgpuId | None
    framework: Framework | None
    group: IommuGroup | None
    members: Sequence[PciAddress]
    """The functions of its group, as the last look saw them."""
    may_open: bool
    """Whether its group may be opened for a moment. Where a pod has something of the group, its VM may be starting."""
    had_tenant: bool
    """Whether another pod has had the whole function, so that it matters what can reset it."""


@dataclass(frozen=True, slots=True)
class FreshFacts:
    """A host after some devices were read again."""

    facts: Facts
    """The facts of the last look where nothing has changed: the same object."""
    members: Members = field(default_factory=dict)
    """The devices of each group by the group's own account."""


def may_sleep(facts: Facts, device: AskedDevice) -> bool:
    """Return whether reading a device calls into a driver, or walks through all processes."""
    return device.framework is Framework.VENDOR_VFIO or _needs_walk(facts, device)


def read_devices(kernel: Kernel, facts: Facts, devices: Iterable[AskedDevice]) -> FreshFacts:
    """Return the host with these devices as they are now; `facts` are those of the last look."""
    reading = DeviceReading(kernel, facts)
    for device in devices:
        reading.read_functions(device)
        if device.vgpu is not None:
            reading.read_vgpu(device, device.vgpu)
        if device.group is not None:
            reading.read_group(device, device.group)
    reading.read_nodes()
    reading.read_users()
    return FreshFacts(reading.facts(), reading.members)


def _needs_walk(facts: Facts, device: AskedDevice) -> bool:
    """Return whether all processes are looked through for a device, since its group is not opened."""
    return device.group is not None and (not device.may_open or device.group not in facts.group_nodes)


class DeviceReading:
    """One request's devices, being read; only what has changed is collected."""

    def __init__(self, kernel: Kernel, facts: Facts) -> None:
        self.members: dict[IommuGroup, Sequence[str] | Unread | None] = {}
        self._kernel = kernel
        self._before = facts
        self._functions: dict[PciAddress, PciFunction | None] = {}
        """Those that have changed; None where one is gone."""
        self._read: set[PciAddress] = set()
        self._vgpus: dict[PciAddress, dict[VgpuId, LiveVgpu | None]] = {}
        self._opened: set[IommuGroup] = set()
        self._unopened: set[IommuGroup] = set()
        self._busy: dict[IommuGroup, str] = {}
        self._walks: dict[IommuGroup, set[PciAddress]] = {}
        """The groups for which processes are looked through, with the functions in them."""
        self._users: dict[IommuGroup, tuple[User, ...]] = {}
        self._lost_groups: set[IommuGroup] = set()
        self._lost_cdevs: set[str] = set()
        """Nodes that were there at the last look."""
        self._has_container = facts.platform.vfio_container

    def read_functions(self, device: AskedDevice) -> None:
        """Read the function that a VM gets, and the GPU below its vGPU."""
        for address in (device.carrier, device.gpu):
            before = self._before.functions.get(address)
            if before is None or address in self._read:
                continue
            self._read.add(address)
            found = pci.read_again(self._kernel, before, reset=device.had_tenant)
            if isinstance(found, MalformedEntry):
                self._functions[address] = None
            elif found is not before:
                self._functions[address] = found

    def _function(self, address: PciAddress) -> PciFunction | None:
        return self._functions[address] if address in self._functions else self._before.functions.get(address)

    def read_vgpu(self, device: AskedDevice, vgpu: VgpuId) -> None:
        """Read what a vGPU is."""
        host, function = self._before.vgpu_hosts.get(device.gpu), self._function(device.carrier)
        before = next((live for live in host.live if live.id == vgpu), None) if host is not None else None
        if host is None or before is None:
            return
        if device.framework is Framework.MDEV:
            found = mdev.read_again(self._kernel, before)
        else:
            found = vendor_vfio.read_again(self._kernel, before, function, host) if function is not None else None
        if found != before:
            self._vgpus.setdefault(device.gpu, {})[vgpu] = found

    def read_group(self, device: AskedDevice, group: IommuGroup) -> None:
        """Read a group's members, and whether somebody has the group open."""
        if device.framework is not Framework.MDEV and group not in self.members:
            members = self.members[group] = iommu.read_members(self._kernel, group)
            if isinstance(members, list):
                self._read_members(device, group, members)
        if group not in self._opened and group not in self._unopened:
            self.see_who_uses(device, group)

    def see_who_uses(self, device: AskedDevice, group: IommuGroup) -> None:
        """Open a group, which tests it and takes it in one step, and close it; or have all processes looked through.

        No VM of a pod is hurt by a group that is busy for that moment, since no pod has anything of it. Where groups
        have no nodes, or a pod has something of this one, processes alone tell who uses it.
        """
        if _needs_walk(self._before, device):
            self._unopened.add(group)
            self._walks[group] = {device.carrier, *device.members}
            return
        try:
            with self._kernel.lease(group):
                self._opened.add(group)
                self._users[group] = ()
        except LeaseUnavailableError:
            self._unopened.add(group)
            self._users[group] = ()  # by its last user it would be refused for good
        except DeviceBusyError as error:
            self._unopened.add(group)
            self._busy[group] = str(error)
            self._walks[group] = {device.carrier, *device.members}

    def _read_members(self, device: AskedDevice, group: IommuGroup, members: Sequence[str]) -> None:
        for address in device.members:
            if address in self._read or (before := self._before.functions.get(address)) is None:
                continue
            self._read.add(address)
            if before.kind is FunctionKind.BRIDGE:
                continue
            found = replace(before, iommu_group=None)
            if address in members:
                found = self._with_binding(before, group)
            if found != before:
                self._functions[address] = found

    def _with_binding(self, before: PciFunction, group: IommuGroup) -> PciFunction:
        """Return a member of a group with its driver, and with its own nodes where these matter, as they are now."""
        driver = iommu.read_member_driver(self._kernel, group, before.address)
        found = before if driver == before.driver else replace(before, driver=driver)
        is_foreign = isinstance(driver, str) and driver not in GROUP_FRIENDLY_DRIVERS
        return pci.with_cdevs(self._kernel, found) if is_foreign or self._before.platform.iommufd else found

    def read_nodes(self) -> None:
        """Read whether the nodes are still there that VMs open; a group that was opened has its node."""
        kernel, facts = self._kernel, self._before
        groups = self._unopened & facts.group_nodes
        self._lost_groups = {one for one in groups if iommu.exists(kernel, iommu.group_node(one)) is False}
        if facts.platform.vfio_container and (self._opened or groups):
            self._has_container = iommu.exists(kernel, iommu.CONTAINER) is not False
        if facts.platform.iommufd:
            functions = (self._function(address) for address in self._read)
            names = {name for one in functions if one is not None for name in one.cdevs} & facts.cdev_nodes
            self._lost_cdevs = {one for one in names if iommu.exists(kernel, iommu.cdev_node(one)) is False}

    def read_users(self) -> None:
        """Look through all processes for the users of groups, where that is needed."""
        if not self._walks:
            return
        members = (self._function(one) for functions in self._walks.values() for one in functions)
        found = read_users_of(self._kernel, self._walks.keys(), cdevs_of(one for one in members if one is not None))
        for group in self._walks:
            self._users[group] = () if isinstance(found, Unread) else found.get(group, ())

    def facts(self) -> Facts:
        """Return the facts with what has changed."""
        before = self._before
        users = before.users or {}
        changed = {group: found for group, found in self._users.items() if users.get(group, ()) != found}
        lost = self._lost_groups or self._lost_cdevs or self._has_container != before.platform.vfio_container
        if not (self._functions or self._vgpus or changed or self._busy or lost):
            return before
        functions = {**before.functions, **self._functions}
        return replace(
            before,
            platform=replace(before.platform, vfio_container=self._has_container),
            functions={one: function for one, function in functions.items() if function is not None},
            vgpu_hosts={gpu: self._with_vgpus(host) for gpu, host in before.vgpu_hosts.items()},
            group_nodes=before.group_nodes - self._lost_groups,
            cdev_nodes=before.cdev_nodes - self._lost_cdevs,
            users={**users, **changed} if changed else before.users,
            busy_groups=self._busy,
        )

    def _with_vgpus(self, host: VgpuHost) -> VgpuHost:
        """Return what a GPU carries, with the vGPUs that have changed."""
        changed = self._vgpus.get(host.gpu)
        if changed is None:
            return host
        found = (changed.get(live.id, live) for live in host.live)
        return replace(host, live=tuple(live for live in found if live is not None))

"""Reads the requested devices again just before they are allocated, because the last scan of the host is already old.

The result is a set of facts that the functions which judge each scan can judge. To find out whether a process has a
device open, the agent opens the device's IOMMU group, or walks once through all processes for all other devices.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, VgpuId
from gpuvirt.facts.pci import (
    GROUP_FRIENDLY_DRIVERS,
    HARMLESS_ATTRIBUTES,
    VFIO_DRIVERS,
    FunctionKind,
    PciFunction,
    Unread,
)
from gpuvirt.facts.snapshot import Facts, FreshFacts, MalformedEntry, OpenDeviceUser, UsersUnknown
from gpuvirt.facts.sysfs import device_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu, pci
from gpuvirt.hardware.functions.modules import driver_of
from gpuvirt.hardware.functions.pci import HEADER_BYTES, LINKS, FunctionReading, read_group, read_reset
from gpuvirt.hardware.usage.users import cdevs_of, read_users_of
from gpuvirt.hardware.vgpu import mdev, vendor_vfio


def read_again(kernel: Kernel, before: PciFunction, *, reset: bool, own_nodes: bool) -> PciFunction | MalformedEntry:
    """Return the current state of a function that was read before, or the reason why it no longer exists.

    Harmless attributes are not read again, nor the ids and the class where the device itself answers with them. The
    reset scope is read only with `reset`, and the own nodes of a function on a VFIO driver only with `own_nodes`: VMs
    open these only if the host has iommufd.
    """
    reading = FunctionReading(kernel, before.address, before)
    identity: tuple[PciId, int] | MalformedEntry = (before.id, before.class_code)
    is_lost = False
    if not _answers_as(reading.header(), before):
        identity, is_lost = reading.identity(), reading.fell_off_bus()
    if isinstance(identity, MalformedEntry):
        return identity
    function = _read_state(reading, before, *identity, is_lost=is_lost, own_nodes=own_nodes)
    if not reset or (now := read_reset(kernel, before.address)) == function.reset:
        return function  # the facts stay the same object: nothing is derived from them again
    return replace(function, reset=now)


def _read_state(
    reading: FunctionReading,
    before: PciFunction,
    function_id: PciId,
    class_code: int,
    *,
    is_lost: bool,
    own_nodes: bool,
) -> PciFunction:
    """Return the function with this identity as it is now; the same object where nothing has changed."""
    driver, group = driver_of(reading.kernel, before.address), read_group(reading.kernel, before.address)
    reading.note(driver, group)
    has_nodes = driver not in VFIO_DRIVERS or (own_nodes and before.cdevs)
    cdevs = reading.cdevs(("vfio-dev",)) if has_nodes else before.cdevs
    physfn = reading.physfn(("physfn",)) if before.physfn is not None else None
    virtfns = _vfs(reading, before) if before.sriov_total_vfs else before.virtfns
    if before.unread:
        reading.note(*(known for known in before.unread if known.path.rpartition("/")[2] in HARMLESS_ATTRIBUTES))
    unread = tuple(reading.unread)
    if (function_id, class_code, driver, group, cdevs, physfn, virtfns, is_lost, unread) == _state_of(before):
        return before  # creating an equal object takes as long as two reads
    return replace(
        before,
        id=function_id,
        class_code=class_code,
        driver=driver,
        iommu_group=group,
        cdevs=cdevs,
        physfn=physfn,
        virtfns=virtfns,
        fell_off_bus=is_lost,
        unread=unread,
    )


_state_of = attrgetter(
    "id", "class_code", "driver", "iommu_group", "cdevs", "physfn", "virtfns", "fell_off_bus", "unread"
)


def _answers_as(header: bytes | OSError, before: PciFunction) -> bool:
    """Return whether configuration space has the ids and the class of `before`; that of a VF has no ids.

    The kernel has read them from there when it found the function, and the attributes repeat them.
    """
    if isinstance(header, OSError) or len(header) != HEADER_BYTES:
        return False
    ids = before.id.vendor | before.id.device << 16 | before.class_code << 72
    return int.from_bytes(header, "little") & _IDS == ids


_IDS = 0xFFFF_FFFF | 0xFF_FFFF << 72
"""The bits of the ids and of the class among the first bytes of configuration space."""


def _vfs(reading: FunctionReading, before: PciFunction) -> tuple[PciAddress, ...]:
    """Return the VFs. All VFs are switched on and off at once, so reading the first one is enough."""
    first = reading.or_before(reading.read_address("virtfn0"), before.virtfns[0] if before.virtfns else None)
    if (first is not None) == bool(before.virtfns):
        return before.virtfns
    entries = reading.or_before(attributes.names(reading.kernel, device_path(before.address)), None)
    return reading.vfs(entries or LINKS)


class AskedDevice(msgspec.Struct, frozen=True):
    """A device that is read again."""

    carrier: PciAddress
    """The function that a VM gets, or that carries its vGPU."""
    gpu: PciAddress
    vgpu: VgpuId | None
    framework: Framework | None
    group: IommuGroup | None
    members: Sequence[PciAddress]
    """The functions of its group, as of the last scan."""
    may_open: bool
    """Whether gpuvirt may open the group for a moment. It may not while a pod has a device of the group: the pod's VM
    may be starting."""
    had_tenant: bool
    """Whether the whole function was allocated to another pod before, so that it must be resettable."""


def may_sleep(facts: Facts, device: AskedDevice) -> bool:
    """Return whether reading a device calls into a driver, or walks through all processes."""
    return device.framework is Framework.VENDOR_VFIO or _needs_walk(facts, device)


def read_at_once(kernel: Kernel, facts: Facts, devices: Sequence[AskedDevice]) -> FreshFacts | None:
    """Return what `read_devices` returns; None if that may sleep, because a driver is called or processes are read."""
    if any(may_sleep(facts, device) for device in devices):
        return None
    reading = _read(kernel, facts, devices)
    return None if reading.needs_walk else reading.fresh()


def read_devices(kernel: Kernel, facts: Facts, devices: Iterable[AskedDevice]) -> FreshFacts:
    """Return the facts of the host with these devices as they are now; `facts` are those of the last scan."""
    reading = _read(kernel, facts, devices)
    reading.read_users()
    return reading.fresh()


def _read(kernel: Kernel, facts: Facts, devices: Iterable[AskedDevice]) -> "DeviceReading":
    """Read the devices, except the processes that have them open where their group can't tell that."""
    reading = DeviceReading(kernel, facts)
    for device in devices:
        reading.read_functions(device)
        if device.vgpu is not None:
            reading.read_vgpu(device, device.vgpu)
        if device.group is not None:
            reading.read_group(device, device.group)
    reading.read_nodes()
    return reading


def _needs_walk(facts: Facts, device: AskedDevice) -> bool:
    """Return whether a device needs a walk through all processes, because its group is not opened."""
    return device.group is not None and (not device.may_open or device.group not in facts.group_nodes)


class DeviceReading:
    """Reads the devices of one request and collects the changes."""

    def __init__(self, kernel: Kernel, facts: Facts) -> None:
        self.members: dict[IommuGroup, Sequence[str] | Unread | None] = {}
        self._kernel = kernel
        self._before = facts
        self._functions: dict[PciAddress, PciFunction | None] = {}
        """The functions that have changed; None for a function that no longer exists."""
        self._read: set[PciAddress] = set()
        self._vgpus: dict[PciAddress, dict[VgpuId, LiveVgpu | None]] = {}
        self._opened: set[IommuGroup] = set()
        self._unopened: set[IommuGroup] = set()
        self._busy: dict[IommuGroup, str] = {}
        self._not_opened: dict[IommuGroup, str] = {}
        """The groups that could not be opened although they may be free, with the error."""
        self._walks: dict[IommuGroup, set[PciAddress]] = {}
        """The groups whose users are found by a walk through all processes, with the functions in them."""
        self._users: dict[IommuGroup, tuple[OpenDeviceUser, ...] | UsersUnknown] = {}
        self._lost_groups: set[IommuGroup] = set()
        self._lost_cdevs: set[str] = set()
        """Nodes that existed at the last scan and no longer exist."""
        self._has_container = facts.platform.vfio_container

    def read_functions(self, device: AskedDevice) -> None:
        """Read the function that a VM gets, and the GPU below its vGPU."""
        kernel, own_nodes = self._kernel, self._before.platform.iommufd
        for address in (device.carrier, device.gpu):
            before = self._before.functions.get(address)
            if before is None or address in self._read:
                continue
            self._read.add(address)
            found = read_again(kernel, before, reset=device.had_tenant, own_nodes=own_nodes)
            if isinstance(found, MalformedEntry):
                self._functions[address] = None
            elif found is not before:
                self._functions[address] = found

    def _function(self, address: PciAddress) -> PciFunction | None:
        return self._functions[address] if address in self._functions else self._before.functions.get(address)

    def read_vgpu(self, device: AskedDevice, vgpu: VgpuId) -> None:
        """Read the type and the group of a vGPU."""
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
        """Read the members of a group, and whether a process has the group open."""
        if device.framework is not Framework.MDEV and group not in self.members:
            members = self.members[group] = iommu.read_members(self._kernel, group)
            if isinstance(members, list):
                self._read_members(device, group, members)
        if group not in self._opened and group not in self._unopened:
            self.see_who_uses(device, group)

    def see_who_uses(self, device: AskedDevice, group: IommuGroup) -> None:
        """Open and close a group, which fails where a process has it open; or mark it for the walk through processes.

        The group is busy for a moment, which affects no pod's VM: no pod has a device of the group. The walk finds the
        users of groups without nodes, of groups of which a pod has a device, and of groups that could not be opened.
        """
        if _needs_walk(self._before, device):
            self._unopened.add(group)
            self._walks[group] = {device.carrier, *device.members}
            return
        try:
            with self._kernel.lease(group):
                self._opened.add(group)
                self._users[group] = ()
        except LeaseUnavailableError as error:
            self._unopened.add(group)
            self._not_opened[group] = str(error)
            self._walks[group] = {device.carrier, *device.members}
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
            is_member = address in members
            found = self._with_binding(before, group) if is_member else replace(before, iommu_group=None)
            if found is not before and found != before:
                self._functions[address] = found

    def _with_binding(self, before: PciFunction, group: IommuGroup) -> PciFunction:
        """Return a member of a group with its current driver, and with its current own nodes where these matter."""
        driver = iommu.read_member_driver(self._kernel, group, before.address)
        found = before if driver == before.driver else replace(before, driver=driver)
        is_foreign = isinstance(driver, str) and driver not in GROUP_FRIENDLY_DRIVERS
        return pci.with_cdevs(self._kernel, found) if is_foreign or self._before.platform.iommufd else found

    def read_nodes(self) -> None:
        """Read whether the nodes that VMs open still exist; a group that could be opened has its node."""
        kernel, facts = self._kernel, self._before
        groups = self._unopened & facts.group_nodes
        # unknown: a node that can't be examined exists, as at the last scan
        self._lost_groups = {group for group in groups if iommu.exists(kernel, iommu.group_node(group)) is False}
        if facts.platform.vfio_container and (self._opened or groups):
            self._has_container = iommu.exists(kernel, iommu.CONTAINER) is not False  # unknown: it exists, as before
        if facts.platform.iommufd:
            functions = (self._function(address) for address in self._read)
            names = {name for function in functions if function is not None for name in function.cdevs}
            known = names & facts.cdev_nodes
            # unknown: a node that can't be examined exists, as at the last scan
            self._lost_cdevs = {name for name in known if iommu.exists(kernel, iommu.cdev_node(name)) is False}

    @property
    def needs_walk(self) -> bool:
        """Whether only a walk through all processes finds the users of a group."""
        return bool(self._walks)

    def read_users(self) -> None:
        """Find the users of the marked groups by one walk through all processes."""
        if not self._walks:
            return
        members = (self._function(address) for addresses in self._walks.values() for address in addresses)
        cdevs = cdevs_of(member for member in members if member is not None)
        found = read_users_of(self._kernel, self._walks.keys(), cdevs)
        for group, users in found.items():
            if isinstance(users, Unread):
                self._users[group] = UsersUnknown(users, self._not_opened.get(group, ""))
            else:
                self._users[group] = users

    def fresh(self) -> FreshFacts:
        """Return all that was read."""
        return FreshFacts(self._facts(), self.members, self._users)

    def _facts(self) -> Facts:
        """Return the facts with the changes."""
        before = self._before
        users = before.users or {}
        # unknown: `users` has it, which decides; users of the last scan have perhaps ended
        known = {group: () if isinstance(found, UsersUnknown) else found for group, found in self._users.items()}
        changed = {group: found for group, found in known.items() if users.get(group, ()) != found}
        lost = self._lost_groups or self._lost_cdevs or self._has_container != before.platform.vfio_container
        if not (self._functions or self._vgpus or changed or self._busy or lost):
            return before
        functions = {**before.functions, **self._functions}
        return replace(
            before,
            platform=replace(before.platform, vfio_container=self._has_container),
            functions={address: function for address, function in functions.items() if function is not None},
            vgpu_hosts={gpu: self._with_vgpus(host) for gpu, host in before.vgpu_hosts.items()},
            group_nodes=before.group_nodes - self._lost_groups,
            cdev_nodes=before.cdev_nodes - self._lost_cdevs,
            users={**users, **changed} if changed else before.users,
            busy_groups=self._busy,
        )

    def _with_vgpus(self, host: VgpuHost) -> VgpuHost:
        """Return a GPU's vGPUs with their changes."""
        changed = self._vgpus.get(host.gpu)
        if changed is None:
            return host
        found = (changed.get(live.id, live) for live in host.live)
        return replace(host, live=tuple(live for live in found if live is not None))

"""One more look at a device just before it is given away: is it still what it was, where it was, and nobody's?"""

from collections.abc import Container, Iterable, Iterator, Mapping

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.pci import (
    GROUP_FRIENDLY_DRIVERS,
    VENDOR_VFIO_DRIVER,
    VFIO_DRIVERS,
    FunctionKind,
    PciFunction,
    Unread,
)
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import device_path, members_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware import attributes, iommu, pci
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.vgpu import mdev, vendor_vfio
from gpuvirt.model.candidates import Candidate
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.resets import is_reset, why_withheld
from gpuvirt.node.deviceuse import Sight, Unclear, look_for_users, needs_walk, try_to_open
from gpuvirt.paths import HostPath


def look(
    kernel: Kernel,
    inventory: Inventory,
    devices: Iterable[Candidate],
    allocated: Container[DeviceId],
    former: Mapping[DeviceId, str],
) -> Mapping[DeviceId, Sight]:
    """Look at the devices of one request; of each the first thing that speaks against it counts.

    `allocated`: the devices that are allocated to a pod already, or of whose group another device is. All processes are
    looked through once for all devices that need it. `former`: the pods that have had whole functions before.
    """
    found: dict[DeviceId, Sight] = {}
    unclear: dict[DeviceId, Unclear] = {}
    for device in devices:
        changed = next(changes(kernel, inventory, device), None)
        if changed is None and (tenant := former.get(device.id)) is not None:
            changed = _why_not_reset(kernel, inventory, device, tenant)
        sight = (
            Sight(changed)
            if changed
            else try_to_open(kernel, inventory.facts, device, allocated=device.id in allocated)
        )
        if isinstance(sight, Sight):
            found[device.id] = sight
        else:
            unclear[device.id] = sight
    return found | dict(look_for_users(kernel, inventory.facts, unclear)) if unclear else found


def changes(kernel: Kernel, inventory: Inventory, device: Candidate) -> Iterator[Reason]:
    """Yield what is no longer as the last look at the host saw it."""
    function = inventory.facts.functions.get(device.carrier)
    if function is None:
        yield _gone(device)
        return
    if device.framework is Framework.MDEV and device.target.vgpu is not None:
        yield from _of_mdev(kernel, device, device.target.vgpu)
        return
    yield from _of_identity(kernel, device, function)
    yield from _of_driver(kernel, device, function)
    if device.group is not None:
        yield from _of_neighbours(kernel, inventory, device, device.group)
    if device.framework is Framework.VENDOR_VFIO:
        yield from _of_type_id(kernel, inventory, device)
    yield from _of_cdevs(kernel, inventory, device)


def may_sleep(facts: Facts, device: Candidate, *, allocated: bool) -> bool:
    """Return whether looking at a device calls into a driver, or walks through all processes."""
    return device.framework is Framework.VENDOR_VFIO or needs_walk(facts, device, allocated=allocated)


def missing_node(
    kernel: Kernel, device: DeviceId, nodes: Iterable[HostPath], opened: Container[HostPath]
) -> Reason | None:
    """Return which of the nodes that a container is to get is not there, None when all are.

    Only what lies below `/dev/vfio` is asked for: an agent without privileges sees no other nodes of the host. What was
    `opened` for the same request is there.
    """
    for node in nodes:
        try:
            if node.startswith(f"{iommu.VFIO}/") and node not in opened:
                kernel.device_number(node)
        except OSError as error:
            if error.errno not in attributes.ABSENT:
                continue
            return Reason(
                ReasonCode.NODE_MISSING,
                device,
                f"can't be opened: there is no {node}",
                seen=f"{node}: {error.strerror}",
                fix="rebind the device to its driver, or restart udev",
            )
    return None


def _of_cdevs(kernel: Kernel, inventory: Inventory, device: Candidate) -> Iterator[Reason]:
    """Yield the functions of a device's group whose own node, which a virtual machine is told, is another by now."""
    if not inventory.facts.platform.iommufd or device.group is None:
        return
    for address in inventory.groups.get(device.group, ()):
        expected, found = (
            inventory.facts.functions[address].cdevs,
            iommu.read_cdevs(kernel, device_path(address)),
        )
        if isinstance(found, Unread):
            yield _unread(device, found)
        elif found != expected:
            yield Reason(
                ReasonCode.NODE_MISSING,
                device.id,
                f"can't be opened as it was: {address} had the node {' '.join(expected) or 'none'} at the last look"
                f" and has {' '.join(found) or 'none'} now",
                seen=pci.attribute(address, "vfio-dev"),
                fix="nothing: it is offered anew as it is",
            )


def _of_identity(kernel: Kernel, device: Candidate, function: PciFunction) -> Iterator[Reason]:
    found_id = pci.read_id(kernel, device.carrier)
    if found_id is None:
        yield _gone(device)
    elif isinstance(found_id, Unread):
        yield _unread(device, found_id)
    elif found_id != function.id:
        yield Reason(
            ReasonCode.IDENTITY_CHANGED,
            device.id,
            f"was {function.id} when it was offered, and is {found_id} now",
            seen=pci.attribute(device.carrier, "device"),
            fix="nothing: it is offered anew as what it is",
        )
    yield from _of_group(device, pci.read_group(kernel, device.carrier))


def _of_group(device: Candidate, group: IommuGroup | Unread | None) -> Iterator[Reason]:
    if isinstance(group, Unread):
        yield _unread(device, group)
    elif group != device.group:
        now = "in none" if group is None else f"in group {group}"
        yield Reason(
            ReasonCode.GROUP_CHANGED,
            device.id,
            f"was in IOMMU group {device.group} when it was offered, and is {now} now",
            fix="nothing: it is offered anew as it is",
        )


def _of_driver(kernel: Kernel, device: Candidate, function: PciFunction) -> Iterator[Reason]:
    driver = pci.read_driver(kernel, device.carrier)
    expected = {VENDOR_VFIO_DRIVER} if device.framework is Framework.VENDOR_VFIO else {*VFIO_DRIVERS, function.driver}
    if isinstance(driver, Unread):
        yield _unread(device, driver)
    elif driver not in expected:
        yield Reason(
            ReasonCode.DRIVER_CHANGED,
            device.id,
            f"is bound to {driver or 'no driver'} now",
            seen=f"{pci.attribute(device.carrier, 'driver')} -> {driver or 'nothing'}",
            fix=f"bind it to {function.driver} again",
        )


def _of_neighbours(kernel: Kernel, inventory: Inventory, device: Candidate, group: IommuGroup) -> Iterator[Reason]:
    """Yield the members of a device's group that spoil it, by the group's own account of its members."""
    members = iommu.read_members(kernel, group)
    if isinstance(members, Unread):
        yield _unread(device, members)
        return
    if members is None:
        yield from _of_group(device, None)
        return
    known = set(inventory.groups.get(group, ()))
    if strange := [member for member in members if member not in known]:
        yield Reason(
            ReasonCode.GROUP_CHANGED,
            device.id,
            f"shares IOMMU group {group} with {', '.join(strange)}, which the last look did not find there",
            seen=members_path(group),
            fix="nothing: the host is looked at again",
        )
        return
    for member in members:
        function = inventory.facts.functions.get(PciAddress(member))
        if member == device.carrier or (function is not None and function.kind is FunctionKind.BRIDGE):
            continue
        driver = iommu.read_member_driver(kernel, group, member)
        if isinstance(driver, Unread):
            yield _unread(device, driver)
        elif driver is not None and driver not in GROUP_FRIENDLY_DRIVERS and not iommu.has_vfio_device(kernel, member):
            yield Reason(
                ReasonCode.GROUP_NOT_VIABLE,
                device.id,
                f"can't be opened while {member} of its IOMMU group {group} is bound to {driver}",
                seen=f"{members_path(group)}/{member}/driver -> {driver}",
                fix="bind all functions of the group to vfio-pci, or unbind them",
            )


def _of_mdev(kernel: Kernel, device: Candidate, vgpu: VgpuId) -> Iterator[Reason]:
    found = mdev.read_type(kernel, vgpu)
    if found is None:
        yield _gone(device)
    elif isinstance(found, Unread):
        yield _unread(device, found)
    elif found != device.target.type:
        yield _other_type(device, found)
    else:
        yield from _of_group(device, mdev.read_group(kernel, vgpu))


def _of_type_id(kernel: Kernel, inventory: Inventory, device: Candidate) -> Iterator[Reason]:
    vgpu = inventory.vgpus.get(VgpuId(device.carrier))
    found = vendor_vfio.read_type_id(kernel, PciAddress(device.carrier))
    if isinstance(found, Unread):
        yield _unread(device, found)
    elif vgpu is None or found is None or found != vgpu.live.type_id:
        yield _other_type(device, "none" if found in {None, vendor_vfio.NO_TYPE} else f"type {found}")


def _why_not_reset(kernel: Kernel, inventory: Inventory, device: Candidate, tenant: str) -> Reason | None:
    scope = pci.read_reset(kernel, device.carrier)
    if is_reset(inventory.facts.functions, device.carrier, scope) is False:
        return why_withheld(device.carrier, tenant)
    return None


def _gone(device: Candidate) -> Reason:
    return Reason(ReasonCode.DEVICE_GONE, device.id, "is gone from the host", fix="nothing: it is no longer offered")


def _other_type(device: Candidate, found: str) -> Reason:
    return Reason(
        ReasonCode.TYPE_CHANGED,
        device.id,
        f"was a {device.target.type} when it was offered, and is {found} now",
        fix="nothing: it is offered anew as what it is",
    )


def _unread(device: Candidate, unread: Unread) -> Reason:
    return Reason(
        ReasonCode.UNREAD,
        device.id,
        "can't be read, so nobody can tell whether it is what it was",
        seen=f"{unread.path}: {unread.said}",
        fix="see the kernel's log",
    )

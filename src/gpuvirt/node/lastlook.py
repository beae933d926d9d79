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
from gpuvirt.facts.sysfs import PCI_DEVICES, device_path, members_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware import attributes, iommu, pci
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.vgpu import mdev, vendor_vfio
from gpuvirt.model.candidates import Candidate
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.reasons import Reason, Seen, refusals, unhealthy
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
        yield unhealthy.device_gone(device.id, PCI_DEVICES, unhealthy.LOOKED_AGAIN)
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
            return unhealthy.node_missing(device, node)
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
            yield refusals.unread(device.id, found)
        elif found != expected:
            yield unhealthy.node_changed(device.id, address, expected, found)


def _of_identity(kernel: Kernel, device: Candidate, function: PciFunction) -> Iterator[Reason]:
    found_id = pci.read_id(kernel, device.carrier)
    if found_id is None:
        yield unhealthy.device_gone(device.id, PCI_DEVICES, unhealthy.LOOKED_AGAIN)
    elif isinstance(found_id, Unread):
        yield refusals.unread(device.id, found_id)
    elif found_id != function.id:
        yield unhealthy.identity_changed(device.id, function.id, found_id, pci.attribute(device.carrier, "device"))
    yield from _of_group(device, pci.read_group(kernel, device.carrier))


def _of_group(device: Candidate, group: IommuGroup | Unread | None) -> Iterator[Reason]:
    if isinstance(group, Unread):
        yield refusals.unread(device.id, group)
    elif group != device.group:
        now = "is in none" if group is None else f"is in group {group}"
        yield unhealthy.group_changed(device.id, device.group, now)


def _of_driver(kernel: Kernel, device: Candidate, function: PciFunction) -> Iterator[Reason]:
    driver = pci.read_driver(kernel, device.carrier)
    expected = {VENDOR_VFIO_DRIVER} if device.framework is Framework.VENDOR_VFIO else {*VFIO_DRIVERS, function.driver}
    if isinstance(driver, Unread):
        yield refusals.unread(device.id, driver)
    elif driver not in expected:
        yield unhealthy.driver_changed(device.id, device.carrier, driver, f"bind it to {function.driver} again")


def _of_neighbours(kernel: Kernel, inventory: Inventory, device: Candidate, group: IommuGroup) -> Iterator[Reason]:
    """Yield the members of a device's group that spoil it, by the group's own account of its members."""
    members = iommu.read_members(kernel, group)
    if isinstance(members, Unread):
        yield refusals.unread(device.id, members)
        return
    if members is None:
        yield from _of_group(device, None)
        return
    known = set(inventory.groups.get(group, ()))
    if strange := [member for member in members if member not in known]:
        yield unhealthy.group_changed(
            device.id, group, f"shares it with {', '.join(strange)}", Seen(members_path(group))
        )
        return
    for member in members:
        function = inventory.facts.functions.get(PciAddress(member))
        if member == device.carrier or (function is not None and function.kind is FunctionKind.BRIDGE):
            continue
        driver = iommu.read_member_driver(kernel, group, member)
        if isinstance(driver, Unread):
            yield refusals.unread(device.id, driver)
        elif driver is not None and driver not in GROUP_FRIENDLY_DRIVERS and not iommu.has_vfio_device(kernel, member):
            yield unhealthy.group_not_viable(device.id, group, [(member, driver)])


def _of_mdev(kernel: Kernel, device: Candidate, vgpu: VgpuId) -> Iterator[Reason]:
    found = mdev.read_type(kernel, vgpu)
    if found is None:
        yield unhealthy.device_gone(device.id, PCI_DEVICES, unhealthy.LOOKED_AGAIN)
    elif isinstance(found, Unread):
        yield refusals.unread(device.id, found)
    elif found != device.target.type:
        yield unhealthy.type_changed(device.id, device.target.type, found)
    else:
        yield from _of_group(device, mdev.read_group(kernel, vgpu))


def _of_type_id(kernel: Kernel, inventory: Inventory, device: Candidate) -> Iterator[Reason]:
    vgpu = inventory.vgpus.get(VgpuId(device.carrier))
    found = vendor_vfio.read_type_id(kernel, PciAddress(device.carrier))
    if isinstance(found, Unread):
        yield refusals.unread(device.id, found)
    elif vgpu is None or found is None or found != vgpu.live.type_id:
        yield unhealthy.type_changed(
            device.id, device.target.type, "none" if found in {None, vendor_vfio.NO_TYPE} else f"type {found}"
        )


def _why_not_reset(kernel: Kernel, inventory: Inventory, device: Candidate, tenant: str) -> Reason | None:
    scope = pci.read_reset(kernel, device.carrier)
    if is_reset(inventory.facts.functions, device.carrier, scope) is False:
        return why_withheld(device.carrier, tenant)
    return None

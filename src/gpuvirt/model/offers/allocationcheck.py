"""Judges devices that the kubelet asks for by facts that were read for that: the judgement is the one of each look.

A device may also have become another one since it was offered. The kubelet does not know that other one, so it is
refused here, and offered as what it is after the next look.
"""

from collections.abc import Iterator, Mapping, Sequence

from gpuvirt.facts.ids import IommuGroup, VgpuId
from gpuvirt.facts.pci import VENDOR_VFIO_DRIVER, Unread
from gpuvirt.facts.sysfs import MDEVS, PCI_DEVICES, device_path, members_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.holds import Holds
from gpuvirt.model.allocation.ledger import Former
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices import candidates
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.health import symptoms
from gpuvirt.model.reasons import Reason, Seen, refusals, unhealthy

Members = Mapping[IommuGroup, Sequence[str] | Unread | None]
"""The devices of each group by the group's own account, None where there is no such group."""

_NOBODY = Holds({}, {}, frozenset())
"""The kubelet asks for devices that no other pod has."""


def why_refused(
    before: Inventory, now: Inventory, members: Members, settings: Settings, device: Candidate, former: Former
) -> Reason | None:
    """Return what speaks against giving a device that was offered of the host `before` and is read again `now`.

    Nothing is debounced. `former`: the other pods that have had whole functions.
    """
    changed = None
    if now is not before:
        changed = (
            _as_another(before, now, device)
            or what_became(now, device, candidates.why_not(now, settings, device))
            or next(_other_nodes(before, now, device), None)
        )
    changed = changed or _other_members(before, members, device)
    return changed or next(symptoms(now, _NOBODY, device, former, allocations_known=True), None)


def what_became(inventory: Inventory, device: Candidate, why_not: Reason | None) -> Reason | None:
    """Return what a device that was offered has become that can't be given, None where it still can be.

    `why_not` is why it could not be offered now.
    """
    function = inventory.facts.functions.get(device.carrier)
    if device.target.vgpu is not None:
        return _of_vgpu(inventory, device, device.target.vgpu) or why_not
    if function is None:
        return gone(device)
    if isinstance(function.driver, str) and not function.on_vfio:
        return _driver_changed(device, function.driver)
    return why_not


def _of_vgpu(inventory: Inventory, device: Candidate, vgpu: VgpuId) -> Reason | None:
    found, function = inventory.vgpus.get(vgpu), inventory.facts.functions.get(device.carrier)
    if found is not None:
        live = found.live.type
        return None if isinstance(live, Unread) or live == device.target.type else _type_changed(device, live)
    if device.framework is not Framework.VENDOR_VFIO or function is None:
        return gone(device)
    if isinstance(function.driver, Unread):
        return refusals.unread(device.id, function.driver)
    if function.driver != VENDOR_VFIO_DRIVER:
        return _driver_changed(device, function.driver)
    return _type_changed(device, "no vGPU")


def _as_another(before: Inventory, now: Inventory, device: Candidate) -> Reason | None:
    """Return that a device is another one, or in another group, though it could be offered."""
    was, function = before.facts.functions.get(device.carrier), now.facts.functions.get(device.carrier)
    if was is not None and function is not None and function.id != was.id:
        return unhealthy.identity_changed(device.id, was.id, function.id, device_path(device.carrier, "device"))
    group = function.iommu_group if function is not None else None
    if device.target.vgpu is not None:
        vgpu = now.vgpus.get(device.target.vgpu)
        group = vgpu.live.group if vgpu is not None else None
    if isinstance(group, int) and group != device.group:
        return _group_changed(device, f"is in group {group}")
    return None


def _other_members(before: Inventory, members: Members, device: Candidate) -> Reason | None:
    """Return that the group's own account of its members is another than that of the last look."""
    if device.group is None or device.group not in members:
        return None
    found = members[device.group]
    if isinstance(found, Unread):
        return refusals.unread(device.id, found)
    if found is None:
        return _group_changed(device, "the group is gone")
    known = before.groups.get(device.group, ())
    if not (strange := ", ".join(member for member in found if member not in known)):
        return None
    return _group_changed(device, f"shares it with {strange}, which the last look did not find there")


def _other_nodes(before: Inventory, now: Inventory, device: Candidate) -> Iterator[Reason]:
    """Yield the functions of a device's group whose own node, which a VM is told, is another by now."""
    if not now.facts.platform.iommufd or device.group is None:
        return
    for address in before.groups.get(device.group, ()):
        was, function = before.facts.functions[address], now.facts.functions.get(address)
        if function is not None and function.cdevs != was.cdevs:
            yield unhealthy.node_changed(device.id, address, was.cdevs, function.cdevs)


def _group_changed(device: Candidate, now: str) -> Reason:
    seen = (Seen(members_path(device.group)),) if device.group is not None else ()
    return unhealthy.group_changed(device.id, device.group, now, *seen)


def _driver_changed(device: Candidate, driver: str | None) -> Reason:
    needed = VENDOR_VFIO_DRIVER if device.framework is Framework.VENDOR_VFIO else "vfio-pci"
    fix = f"bind it to {needed} again, or stop the VM that has it"
    return unhealthy.driver_changed(device.id, device.carrier, driver, fix)


def _type_changed(device: Candidate, found: str) -> Reason:
    fix = "none is needed if no VM has it: it is offered as it is now; else restart the VM that has it"
    return unhealthy.type_changed(device.id, device.target.type, found, fix)


def gone(device: Candidate) -> Reason:
    """Return that a device is there no longer."""
    is_mdev = device.target.vgpu is not None and device.framework is not Framework.VENDOR_VFIO
    return unhealthy.device_gone(device.id, MDEVS if is_mdev else PCI_DEVICES)

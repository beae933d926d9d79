"""Checks the devices of an Allocate call against newly read facts, with the rules of every observation.

A device may have become another one since it was offered. The kubelet has not listed the new one, so the call is
refused, and the new device is offered after the next observation.
"""

from collections.abc import Iterator

from gpuvirt.facts.ids import VgpuId
from gpuvirt.facts.pci import VENDOR_VFIO_DRIVER, Unread
from gpuvirt.facts.snapshot import FreshFacts, UsersUnknown
from gpuvirt.facts.sysfs import MDEVS, PCI_DEVICES, device_path, members_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices import candidates
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.offers import symptoms
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.reasons.reason import driver_link

_NO_ALLOCATED_DEVICES = AllocatedDevices({}, {}, frozenset())
"""The kubelet requests only devices that are not allocated to another pod."""


def why_refused(
    before: Inventory, now: Inventory, fresh: FreshFacts, settings: Settings, device: Candidate, former: FormerTenants
) -> Reason | None:
    """Return the reason to refuse a device that was offered from the inventory `before` and read again for `now`.

    Nothing is debounced. `former`: the last tenants of GPUs. `why_unseen` says whether unknown users are a reason, too.
    """
    changed = None
    if now is not before:
        changed = (
            _identity_change(before, now, device)
            or why_changed(now, device, candidates.why_not(now, settings, device))
            or next(_node_changes(before, now, device), None)
        )
    changed = changed or _member_change(before, fresh, device)
    against = symptoms(
        now,
        _NO_ALLOCATED_DEVICES,
        device,
        former,
        allocations_known=True,
        grace_without_driver=settings.grace_without_driver,
    )
    return changed or next(against, None)


def why_unseen(fresh: FreshFacts, device: Candidate) -> Reason | None:
    """Return why it is unknown whether a process has a device open, None if that is known or the device has no group.

    The group did not open, or may not be opened, and a walk through all processes could not see all.
    """
    if device.group is None:
        return None
    match fresh.users.get(device.group):
        case None:
            return refusals.users_unseen(device.id)
        case UsersUnknown() as users:
            lease = (Seen("", users.not_opened),) if users.not_opened else ()
            return refusals.users_unseen(device.id, *lease, Seen(users.unread.path, users.unread.detail))
        case _:
            return None


def why_changed(inventory: Inventory, device: Candidate, why_not: Reason | None) -> Reason | None:
    """Return why an offered device can no longer be allocated, None where it still can be.

    `why_not` is the reason not to offer it now.
    """
    function = inventory.facts.functions.get(device.carrier)
    if device.target.vgpu is not None:
        return _vgpu_change(inventory, device, device.target.vgpu) or why_not
    if function is None:
        return device_gone(device)
    if isinstance(function.driver, str) and not function.on_vfio:
        return _driver_changed(device, function.driver)
    return why_not


def _vgpu_change(inventory: Inventory, device: Candidate, vgpu: VgpuId) -> Reason | None:
    found, function = inventory.vgpus.get(vgpu), inventory.facts.functions.get(device.carrier)
    if found is not None:
        live = found.live.type
        return None if isinstance(live, Unread) or live == device.target.type else _type_changed(device, live)
    if device.framework is not Framework.VENDOR_VFIO or function is None:
        return device_gone(device)
    if isinstance(function.driver, Unread):
        return refusals.unread(device.id, function.driver)
    if function.driver != VENDOR_VFIO_DRIVER:
        return _driver_changed(device, function.driver)
    return _type_changed(device, "no vGPU")


def _identity_change(before: Inventory, now: Inventory, device: Candidate) -> Reason | None:
    """Return the reason against a device that could be offered, but has another id or another group than before."""
    was, function = before.facts.functions.get(device.carrier), now.facts.functions.get(device.carrier)
    if was is not None and function is not None and function.id != was.id:
        return Reason(
            ReasonCode.IDENTITY_CHANGED,
            device.id,
            f"was {was.id} when it was offered, and is {function.id} now",
            (Seen(device_path(device.carrier, "device"), str(function.id)),),
            notoffered.OFFERED_AGAIN,
        )
    group = function.iommu_group if function is not None else None
    if device.target.vgpu is not None:
        vgpu = now.vgpus.get(device.target.vgpu)
        group = vgpu.live.group if vgpu is not None else None
    if isinstance(group, int) and group != device.group:
        return _group_changed(device, f"is in group {group}")
    return None


def _member_change(before: Inventory, fresh: FreshFacts, device: Candidate) -> Reason | None:
    """Return the reason against a device whose group has members that the last observation did not find."""
    if device.group is None or device.group not in fresh.members:
        return None
    found = fresh.members[device.group]
    if isinstance(found, Unread):
        return refusals.unread(device.id, found)
    if found is None:
        return _group_changed(device, "the group does not exist")
    known = before.groups.get(device.group, ())
    strange = [member for member in found if member not in known]
    return _group_changed(device, f"the group also has {', '.join(strange)}") if strange else None


def _node_changes(before: Inventory, now: Inventory, device: Candidate) -> Iterator[Reason]:
    """Yield a reason for each function of a device's group whose VFIO device node has changed: VMs get its name."""
    if not now.facts.platform.iommufd or device.group is None:
        return
    for address in before.groups.get(device.group, ()):
        was, function = before.facts.functions[address], now.facts.functions.get(address)
        if function is not None and function.cdevs != was.cdevs:
            nodes = (f"{address}: {' '.join(found) or 'none'}" for found in (function.cdevs, was.cdevs))
            yield notoffered.node_missing(device.id, *nodes)


def _group_changed(device: Candidate, now: str) -> Reason:
    seen = (Seen(members_path(device.group)),) if device.group is not None else ()
    return Reason(
        ReasonCode.GROUP_CHANGED,
        device.id,
        f"was in IOMMU group {device.group} when it was offered, and {now} now",
        (*seen,),
        notoffered.OFFERED_AGAIN,
    )


def _driver_changed(device: Candidate, driver: str | None) -> Reason:
    needed = VENDOR_VFIO_DRIVER if device.framework is Framework.VENDOR_VFIO else "vfio-pci"
    fix = f"bind it to {needed} again, or stop the VM that uses it"
    return Reason(
        ReasonCode.DRIVER_CHANGED,
        device.id,
        f"is bound to {driver or 'no driver'} now, not to the driver that it was offered with",
        (driver_link(device.carrier, driver),),
        fix,
    )


def _type_changed(device: Candidate, found: str) -> Reason:
    fix = "none if no VM uses it, since gpuvirt offers it with its new type; otherwise restart the VM that uses it"
    return Reason(
        ReasonCode.TYPE_CHANGED,
        device.id,
        f"was a {device.target.type} vGPU when it was offered, and is {found} now",
        fix=fix,
    )


def device_gone(device: Candidate) -> Reason:
    """Return the reason against a device that no longer exists."""
    is_mdev = device.target.vgpu is not None and device.framework is not Framework.VENDOR_VFIO
    return notoffered.device_gone(device.id, MDEVS if is_mdev else PCI_DEVICES)

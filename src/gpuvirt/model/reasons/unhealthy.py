"""Why a device that is offered can't be given to a pod: by the last look at the host, or by the one at Allocate."""

from collections.abc import Sequence

from gpuvirt.facts.snapshot import User
from gpuvirt.model.reasons.reason import Reason, Seen, device_file, driver_link, opened_by
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import named

LOOKED_AGAIN = "none is needed: it is offered again as it is now"
STOP_OR_RESTART = "put it back, or stop the VM that has it"
OPENED_ELSEWHERE = "stop that process, or take the device out of this node's pool"


def node_missing(device: str, node: str, message: str = "", fix: str = "") -> Reason:
    """A VM opens the device by a node that does not exist."""
    message = message or f"can't be opened: {node} does not exist"
    fix = fix or "rebind it to its driver, or restart udev; the node comes with the first device of the group"
    return Reason(ReasonCode.NODE_MISSING, device, message, (Seen.absent(node),), fix)


def node_changed(device: str, address: str, before: Sequence[str], now: Sequence[str]) -> Reason:
    """A VM would be told the name of another device's node."""
    message = f"can't be opened as it was offered: the node of {address} was {' '.join(before) or 'none'}"
    seen = (Seen(device_file(address, "vfio-dev"), " ".join(now) or "none"),)
    return Reason(ReasonCode.NODE_MISSING, device, message, seen, LOOKED_AGAIN)


def group_not_viable(device: str, group: int | None, spoiling: Sequence[tuple[str, str]]) -> Reason:
    """The kernel gives a group to VFIO only when no driver of the host has a member."""
    names = ", ".join(f"{address} ({driver})" for address, driver in spoiling)
    message = f"can't be opened while the host uses {names} of IOMMU group {group}"
    fix = "bind all functions of the group to vfio-pci, or unbind them"
    seen = tuple(driver_link(address, driver) for address, driver in spoiling[:1])
    return Reason(ReasonCode.GROUP_NOT_VIABLE, device, message, seen, fix)


def in_use_elsewhere(device: str, users: Sequence[User], *seen: Seen) -> Reason:
    """A process that belongs to no pod has the device open."""
    who = named(users) or "a process that can't be seen from here"
    seen = seen or opened_by(users)
    message = f"is in use by {who}, which belongs to no pod that the kubelet knows"
    return Reason(ReasonCode.IN_USE_ELSEWHERE, device, message, seen, OPENED_ELSEWHERE)


def not_reset(address: str, tenant: str, why: str, danger: str) -> Reason:
    """The next tenant would find what the last one has left."""
    message = f"{why}, and {tenant} has had it since the host booted: {danger}"
    fix = "reboot the host, or bind all functions of its bus to vfio-pci; `require_reset: false` gives it as it is"
    seen = (Seen(device_file(address, "reset_method"), "lists no way"),)
    return Reason(ReasonCode.NO_RESET, address, message, seen, fix)


def type_changed(device: str, before: object, now: str, fix: str = LOOKED_AGAIN) -> Reason:
    """The vGPU is not what was offered or allocated."""
    message = f"was a {before} vGPU when it was offered, and is {now} now"
    return Reason(ReasonCode.TYPE_CHANGED, device, message, fix=fix)


def device_gone(device: str, folder: str, fix: str = STOP_OR_RESTART) -> Reason:
    """The device was removed while a pod had it, or since the last look."""
    seen = (Seen.absent(f"{folder}/{device}"),)
    return Reason(ReasonCode.DEVICE_GONE, device, "has been removed from the host", seen, fix)


def driver_changed(device: str, address: str, driver: str | None, fix: str) -> Reason:
    """Another driver has the function than when it was offered."""
    message = f"is bound to {driver or 'no driver'} now, not to the driver that it was offered with"
    return Reason(ReasonCode.DRIVER_CHANGED, device, message, (driver_link(address, driver),), fix)


def identity_changed(device: str, before: object, now: object, path: str) -> Reason:
    """Another card is in the slot."""
    message, seen = f"was {before} when it was offered, and is {now} now", (Seen(path, str(now)),)
    return Reason(ReasonCode.IDENTITY_CHANGED, device, message, seen, LOOKED_AGAIN)


def group_changed(device: str, before: int | None, now: str, *seen: Seen) -> Reason:
    """The IOMMU group is not what it was at the last look."""
    message = f"was in IOMMU group {before} when it was offered, and {now} now"
    return Reason(ReasonCode.GROUP_CHANGED, device, message, seen, LOOKED_AGAIN)


def unknown_resource(resource: str) -> Reason:
    """The kubelet asks for a resource that the agent no longer offers."""
    return Reason(ReasonCode.UNKNOWN_RESOURCE, resource, "is not offered on this node", fix="see: gpuvirt devices")


def unknown_device(device: str, resource: str, known: Sequence[str]) -> Reason:
    """The kubelet asks for a device that the resource does not have."""
    seen = (Seen("its devices", ", ".join(known) or "none"),)
    return Reason(ReasonCode.UNKNOWN_DEVICE, device, f"is no device of {resource}", seen, "see: gpuvirt devices")

"""Why an offered device can't be allocated: by the last observation of the host, or by the check at Allocate."""

from collections.abc import Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, is_mdev_uuid, slot_of
from gpuvirt.facts.pci import GRACE_DRIVER, PciFunction
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link, opened_by
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import named

OFFERED_AGAIN = "no action needed: the agent offers the device again in its present state"
STOP_OR_RESTART = "restore the device, or stop the VM that uses it"
OPENED_ELSEWHERE = "stop that process, or stop offering the device on this node"


def node_missing(device: str, node: str, message: str = "", fix: str = "") -> Reason:
    """The node by which a VM opens the device does not exist."""
    message = message or f"can't be opened: {node} does not exist"
    fix = fix or "bind it to its driver again, or restart udev; a group's node appears with the group's first device"
    return Reason(ReasonCode.NODE_MISSING, device, message, (Seen.absent(node),), fix)


def node_changed(device: str, address: str, before: Sequence[str], now: Sequence[str]) -> Reason:
    """The VM would get the name of another device's node."""
    message = f"can't be opened as it was offered: the node of {address} was {' '.join(before) or 'none'}"
    seen = (Seen(sysfs.device_path(address, "vfio-dev"), " ".join(now) or "none"),)
    return Reason(ReasonCode.NODE_MISSING, device, message, seen, OFFERED_AGAIN)


def group_not_viable(
    device: str, gpu: PciAddress, group: int | None, spoiling: Sequence[PciFunction], *, is_whole: bool = True
) -> Reason:
    """VFIO can open a group only if no driver of the host has a member; `is_whole`: the device is not a vGPU."""
    names = ", ".join(f"{function.address} ({function.driver})" for function in spoiling)
    message = f"can't be opened while the host uses {names} of IOMMU group {group}"
    foreign = [found.address for found in spoiling if slot_of(found.address) != slot_of(gpu)]
    if not is_whole:
        fix = f"give each function of {gpu} its own IOMMU group: ACS and ARI in the firmware's setup, or another slot"
    elif foreign:  # the host may need it, so gpuvirt binds it only where the admin names it
        also = " ".join(f"--also {address}" for address in foreign)
        fix = (
            f"move the GPU to another slot: {', '.join(foreign)} is not part of its card, and the host may need it;"
            f" where it does not: gpuvirt vfio bind {gpu} {also}"
        )
    else:  # gpuvirt binds a GPU together with all functions of its slot
        fix = f"gpuvirt vfio bind {gpu}"
    seen = tuple(driver_link(function.address, function.driver) for function in spoiling)
    return Reason(ReasonCode.GROUP_NOT_VIABLE, device, message, seen, fix)


def grace_driver_missing(
    device: str, address: str, driver: str | None, *seen: Seen, has_driver: bool = False
) -> Reason:
    """A VM would get a Grace GPU without its memory; `has_driver`: the host has the driver that passes it."""
    lacks = f"gives a VM no memory of a Grace GPU, which only {GRACE_DRIVER} passes to it"
    is_bound = driver == "vfio-pci"
    message = f"is bound to vfio-pci, which {lacks}" if is_bound else f"can't be bound for VMs: vfio-pci {lacks}"
    fix = (
        *(() if has_driver else (f"boot a kernel with {GRACE_DRIVER} (Linux 6.9, CONFIG_NVGRACE_GPU_VFIO_PCI)",)),
        *((f"gpuvirt vfio unbind {address}",) if is_bound else ()),
        f"gpuvirt vfio bind {address}",
    )
    but = "; the setting `grace_without_driver: true` offers the GPU without its memory"
    places = (driver_link(address, driver), *seen)
    return Reason(ReasonCode.GRACE_DRIVER_MISSING, device, message, places, ", then ".join(fix) + but)


CONSOLE_BLOCKS = "the console's framebuffer occupies the GPU's memory: VMs fail with `BAR: can't reserve`"


def boot_console(device: str, address: str, use: str) -> Reason:
    """The firmware's framebuffer is in the GPU's memory; `use`: `drives the console (fb0)`."""
    message = f"{use}, and {CONSOLE_BLOCKS}"
    fix = (
        "in the firmware's setup: make the onboard display the primary one; or prevent the kernel from using the"
        " firmware's framebuffer, by the argument that gpuvirt doctor names"
    )
    return Reason(ReasonCode.BOOT_CONSOLE, device, message, (Seen(sysfs.device_path(address, "boot_vga")),), fix)


def in_use_elsewhere(device: str, users: Sequence[OpenDeviceUser], *seen: Seen) -> Reason:
    """A process that belongs to no pod has the device open."""
    user = named(users) or "a process that gpuvirt can't see"
    seen = seen or opened_by(users)
    message = f"is in use by {user}, which belongs to no pod of the kubelet"
    return Reason(ReasonCode.IN_USE_ELSEWHERE, device, message, seen, OPENED_ELSEWHERE)


NO_RESET_METHOD = "has no reset method that the kernel supports"
RESET_UNKNOWN = "may have no reset method that the kernel supports"
KEEPS_MEMORY = "the next VM may read the memory that the last VM left in it, or hang"


def no_reset(address: str, *seen: Seen, is_amds: bool) -> Reason:
    """The kernel can't reset a GPU on a VFIO driver, which its next tenant would get as the last one left it."""
    first = (
        "install the module vendor-reset, if the card is older than RDNA 2"
        if is_amds
        else "update the card's firmware, and the host's"
    )
    fix = f"{first}; until then reboot the host before another tenant gets the GPU"
    return Reason(ReasonCode.NO_RESET, address, NO_RESET_METHOD, seen, fix)


def not_reset(address: str, tenant: str, *, is_known: bool) -> Reason:
    """The next tenant would get the GPU in the state in which the last one left it.

    `is_known`: the kernel can't reset the GPU; else that could not be read.
    """
    why, danger = (NO_RESET_METHOD, RESET_UNKNOWN)[not is_known], "the next tenant may read the memory left in it"
    message = f"{why}, and {tenant} has used it since the host booted: {danger}"
    fix = (
        "reboot the host, or bind all functions of its bus to vfio-pci; `require_reset: false`, and the option"
        " --without-reset of gpuvirt vfio unbind, let the next tenant use it without a reset"
    )
    seen = (Seen(sysfs.device_path(address, "reset_method"), "lists no method" if is_known else "not read"),)
    return Reason(ReasonCode.NO_RESET, address, message, seen, fix)


def type_changed(device: str, before: object, now: str, fix: str = OFFERED_AGAIN) -> Reason:
    """The vGPU has another type than when it was offered or allocated."""
    message = f"was a {before} vGPU when it was offered, and is {now} now"
    return Reason(ReasonCode.TYPE_CHANGED, device, message, fix=fix)


def device_gone(device: str, folder: str, fix: str = STOP_OR_RESTART) -> Reason:
    """The device was removed while it was allocated, or since the last observation."""
    seen = (Seen.absent(f"{folder}/{device}"),)
    return Reason(ReasonCode.DEVICE_GONE, device, "has been removed from the host", seen, fix)


def awaited_vgpu(device: str) -> Reason:
    """The vGPU of a pod from before a reboot has not been made again yet."""
    message = (
        "was the vGPU of a pod before the host rebooted, and has not been created again yet; the pod's containers wait"
    )
    fix = (
        "wait for the agent, which creates it again if the node's vGPU config still includes it; otherwise delete the"
        " pod"
    )
    seen = (Seen.absent(f"{sysfs.MDEVS}/{device}"),) if is_mdev_uuid(device) else ()
    return Reason(ReasonCode.AWAITED_AFTER_REBOOT, device, message, seen, fix)


def awaited_gpu(device: str, seen: tuple[Seen, ...]) -> Reason:
    """The whole GPU of a pod from before a reboot has not been bound again yet."""
    message = (
        "was the GPU of a pod before the host rebooted, and is not bound for VMs again yet; the pod's containers wait"
    )
    fix = "wait for the agent, which binds it if its mode is passthrough; otherwise delete the pod"
    return Reason(ReasonCode.AWAITED_AFTER_REBOOT, device, message, seen, fix)


def driver_changed(device: str, address: str, driver: str | None, fix: str) -> Reason:
    """The function is bound to another driver than when it was offered."""
    message = f"is bound to {driver or 'no driver'} now, not to the driver that it was offered with"
    return Reason(ReasonCode.DRIVER_CHANGED, device, message, (driver_link(address, driver),), fix)


def identity_changed(device: str, before: object, now: object, path: str) -> Reason:
    """Another card is in the slot."""
    message, seen = f"was {before} when it was offered, and is {now} now", (Seen(path, str(now)),)
    return Reason(ReasonCode.IDENTITY_CHANGED, device, message, seen, OFFERED_AGAIN)


def group_changed(device: str, before: int | None, now: str, *seen: Seen) -> Reason:
    """The IOMMU group has changed since the last observation."""
    message = f"was in IOMMU group {before} when it was offered, and {now} now"
    return Reason(ReasonCode.GROUP_CHANGED, device, message, seen, OFFERED_AGAIN)


def unknown_resource(resource: str) -> Reason:
    """The kubelet asks for a resource that the agent no longer offers."""
    return Reason(ReasonCode.UNKNOWN_RESOURCE, resource, "is not offered on this node", fix="see: gpuvirt devices")


def unknown_device(device: str, resource: str, known: Sequence[str]) -> Reason:
    """The kubelet asks for a device that the resource does not have."""
    seen = (Seen("its devices", ", ".join(known) or "none"),)
    return Reason(ReasonCode.UNKNOWN_DEVICE, device, f"is not a device of {resource}", seen, "see: gpuvirt devices")

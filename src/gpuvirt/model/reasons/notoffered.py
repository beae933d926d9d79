"""Why a device is not offered to pods, or can't be allocated although it is offered."""

from collections.abc import Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, is_mdev_uuid, slot_of
from gpuvirt.facts.pci import AMD, GRACE_DRIVER, PciFunction
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import move_or_bind

CHECKPOINT = "kubelet_internal_checkpoint"
OFFERED_AGAIN = "no action needed: the agent offers the device again in its present state"
STOP_OR_RESTART = "restore the device, or stop the VM that uses it"
OPENED_ELSEWHERE = "stop that process, or stop offering the device on this node"


def node_missing(device: str, node: str, before: str | None = None) -> Reason:
    """The node by which a VM opens the device does not exist; or is not the one that was offered (`before`)."""
    message, seen = f"can't be opened: {node} does not exist", Seen.absent(node)
    fix = "udevadm trigger --action=add; where that does not help, unbind the device and bind it to its driver again"
    if node.endswith("/vfio/vfio"):  # the node of VFIO itself, which its module makes
        fix = "modprobe vfio"
    if before is not None:
        message, fix = f"can't be opened as it was offered, by the node {before}", OFFERED_AGAIN
        seen = Seen("its node", node)
    return Reason(ReasonCode.NODE_MISSING, device, message, (seen,), fix)


def group_not_viable(
    device: str,
    gpu: PciAddress,
    spoiling: Sequence[PciFunction],
    *,
    is_whole: bool = True,
    by_modes: bool = False,
    together: Sequence[PciAddress] = (),
) -> Reason:
    """VFIO can open a group only if no driver of the host has a member.

    `is_whole`: the device is not a vGPU; `by_modes`: the spoiling GPU has, or is to have, another mode; `together`: the
    GPUs of the group that would have to return to the host with the spoiling one.
    """
    names = ", ".join(f"{function.address} ({function.kind}, {function.driver})" for function in spoiling)
    message = f"can't be opened while the host uses {names} of its IOMMU group"
    foreign = [found.address for found in spoiling if slot_of(found.address) != slot_of(gpu)]
    if by_modes:
        message = f"can't serve VMs: by its mode, the host has {names} of the same IOMMU group"
        fix = "set the same mode for both"
    elif together:
        message = f"can't serve VMs once {names} of its IOMMU group returns to the host"
        command = f"gpuvirt vfio unbind {' '.join(together)}"
        fix = f"return the GPUs of the group together: {command}; an agent does so if they have the same mode"
    elif not is_whole:
        fix = f"give each function of {gpu} its own IOMMU group: ACS and ARI in the firmware's setup, or another slot"
    elif foreign:
        fix = move_or_bind(gpu, foreign)
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


KEEPS_MEMORY = "the next VM may read the memory that the last VM left in it, or hang"


def no_reset(
    address: str, function: PciFunction | None, *seen: Seen, is_known: bool = True, tenant: str | None = None
) -> Reason:
    """The next tenant would get the GPU in the state in which the last one left it.

    `is_known`: the kernel can't reset the GPU; else that could not be read. `tenant` has used it since the boot.
    """
    message = f"{'has' if is_known else 'may have'} no reset method that the kernel supports"
    if tenant is not None:
        message += f", and {tenant} has used it since the host booted: the next tenant may read the memory left in it"
    is_amds = function is not None and function.id.vendor == AMD
    mend = (
        "install the module vendor-reset if the card is older than RDNA 2" if is_amds else "update the card's firmware"
    )
    fix = (
        f"reboot the host before another tenant gets the GPU, and {mend}; to let the next tenant use it as it is:"
        f" `require_reset: false`, or gpuvirt vfio unbind --without-reset {address}"
    )
    method = Seen(sysfs.device_path(PciAddress(address), "reset_method"), "lists no method" if is_known else "not read")
    return Reason(ReasonCode.NO_RESET, address, message, seen or (method,), fix)


def for_claims(device: str) -> Reason:
    """Claims get the GPU: a device plugin that offered it, too, would give it twice."""
    return Reason(
        ReasonCode.OFFERED_TO_CLAIMS,
        device,
        "is offered to claims (DRA), and by no device plugin",
        fix="request it by a ResourceClaim (docs/dra.md), or give the GPU another mode",
    )


def device_gone(device: str, folder: str, fix: str = STOP_OR_RESTART) -> Reason:
    """The device was removed while it was allocated, or since the last observation."""
    seen = (Seen.absent(f"{folder}/{device}"),)
    return Reason(ReasonCode.DEVICE_GONE, device, "has been removed from the host", seen, fix)


def awaited(device: str, *seen: Seen, is_vgpu: bool = True) -> Reason:
    """The vGPU of a pod from before a reboot has not been made again yet, or its whole GPU has not been bound again."""
    message, agent = (
        "GPU of a pod before the host rebooted, and is not bound for VMs again yet",
        "binds it if its mode is passthrough",
    )
    if is_vgpu:
        message = "vGPU of a pod before the host rebooted, and has not been created again yet"
        agent = "creates it again if the node's vGPU config still includes it"
        seen = (Seen.absent(f"{sysfs.MDEVS}/{device}"),) if is_mdev_uuid(device) else ()
    fix = f"wait for the agent, which {agent}; otherwise delete the pod"
    message = f"was the {message}; the pod's containers wait"
    return Reason(ReasonCode.AWAITED_AFTER_REBOOT, device, message, seen, fix)


def unknown_resource(resource: str) -> Reason:
    """The kubelet asks for a resource that the agent no longer offers."""
    return Reason(ReasonCode.UNKNOWN_RESOURCE, resource, "is not offered on this node", fix="see: gpuvirt devices")


def unknown_device(device: str, resource: str, known: Sequence[str]) -> Reason:
    """The kubelet asks for a device that the resource does not have."""
    seen = Seen("its devices", ", ".join(known) or "none")
    return not_recorded(device, f"is not a device of {resource}", "see: gpuvirt devices", seen)


def not_recorded(device: str, message: str, fix: str, seen: Seen) -> Reason:
    """No device that gpuvirt knows, or no container of the kubelet's record, has this id."""
    return Reason(ReasonCode.UNKNOWN_DEVICE, device, message, (seen,), fix)


BY_AGENT = "or mode: passthrough in the agent's settings, to offer it to VMs"


def no_driver(
    address: str,
    to_bind: str = "",
    *,
    carries_vgpus: bool = False,
    by_hand: bool = False,
    is_left: bool = False,
    stub: str | None = None,
) -> Reason:
    """No driver has the function; `carries_vgpus`: NVIDIA's vGPU manager would create vGPUs on it.

    `to_bind`: how it gets to VMs. `stub`: the driver that only reserves it.

    `by_hand`: the host has NVSwitches, so that only an admin returns it to its driver. `is_left`: a change ends so.
    """
    message = "is left without a driver" if is_left else "is bound to no driver"
    to_host = f"gpuvirt vfio unbind {address}"
    if by_hand:
        message += ", and on a host with NVSwitches the driver may hang when it probes a single GPU"
        to_host = probe_command(address)
    fix = f"{to_bind}; to return it to the host: {to_host}" if to_bind else to_host
    if carries_vgpus:
        fix += "; for vGPUs install NVIDIA's vGPU manager, whose driver the host lacks or has not bound to the GPU"
    if stub is not None:
        message = f"is bound to {stub}, which only reserves it: neither the host nor a VM can use it"
    places = () if is_left else (driver_link(address, stub),)
    return Reason(ReasonCode.NO_DRIVER, address, message, places, fix)


def probe_command(address: str) -> str:
    """Return the command by which an admin binds a GPU of a host with NVSwitches to its driver."""
    return f"when all GPUs are free: echo {address} > {sysfs.DRIVERS_PROBE}"


def no_vgpus(subject: str, message: str, *seen: Seen, fix: str = "create vGPUs: gpuvirt vgpu apply") -> Reason:
    """A GPU, or the host, could carry vGPUs."""
    return Reason(ReasonCode.NO_VGPUS, subject, message, seen, fix)


def malformed(subject: str, what: str, *seen: Seen) -> Reason:
    """An entry of sysfs does not have the form that its place requires."""
    return Reason(ReasonCode.MALFORMED_SYSFS_ENTRY, subject, what, seen)


def withdrawn(device: str, *, is_vgpu: bool = False, unshared: str | None = None) -> Reason:
    """The device returns to the host's driver, or the vGPU is removed; `unshared`: why the GPU is not shared yet."""
    message = "is being returned to the host's driver, so it is no longer offered"
    fix = "to keep it for VMs, set mode passthrough for it"
    if is_vgpu:
        message = "is no longer desired, so it is no longer offered, and is removed when it is free"
        fix = "to keep it, set a vGPU config that includes it"
    if unshared is not None:
        message = f"{unshared}, which changes before containers share the GPU"
        fix = "no action needed: the agent changes it when no VM uses the GPU; `gpuvirt status` shows what it waits for"
    return Reason(ReasonCode.WITHDRAWN, device, message, fix=fix)

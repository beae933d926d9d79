"""Why a GPU does not carry the desired vGPUs."""

from collections.abc import Collection, Mapping, Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction
from gpuvirt.facts.vgpu import LiveVgpu
from gpuvirt.model.reasons import notoffered, refusals
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode

SMI = "nvidia-smi -q"
OTHER_MAKERS = (
    "find the other program that creates or removes vGPUs on this host: another device manager, KubeVirt's mediated"
    " devices"
)


KUBELET = "the kubelet, which may give it to a pod at any moment"
"""Stands for the user of a vGPU that nobody uses while the kubelet still counts it."""


def vgpu_in_use(vgpu: LiveVgpu, users: Sequence[str], why: str = "is no longer desired") -> Reason:
    """A vGPU stays because it is in use, or still offered; `why` has the change that waits for that."""
    if tuple(users) == (KUBELET,):
        return refusals.still_counted(vgpu.id, (), why)
    seen = Seen(sysfs.device_path(vgpu.parent), f"carries it as {vgpu.type}")
    return still_used(vgpu.id, f"{why}, and stays while it is in use: {', '.join(users)}", seen)


def still_used(subject: str, message: str, *seen: Seen) -> Reason:
    """A vGPU, or a VM on a GPU, delays a change."""
    fix = "stop those users; an agent then changes the GPU, a command has to be repeated"
    return Reason(ReasonCode.VGPU_IN_USE, subject, message, seen, fix)


def vgpu_keeps_mode(vgpu: LiveVgpu, users: Sequence[str], step: str) -> Reason:
    """A GPU can change its mode only while it carries no vGPU."""
    return vgpu_in_use(vgpu, users, f"prevents a change of its GPU's mode ({step})")


def mode_pending(gpu: PciAddress, *, on: bool) -> Reason:
    """The driver has recorded the mode, and the GPU needs a reset to change to it."""
    message = f"has MIG mode {'on' if on else 'off'} only after a reset of the GPU or a reboot of the host"
    fix = f"when the GPU is free: nvidia-smi --gpu-reset -i {gpu}; or reboot the host"
    seen = (Seen(SMI, f"MIG Mode / Current: {_enabled(on=not on)}, Pending: {_enabled(on=on)}"),)
    return Reason(ReasonCode.MODE_PENDING, gpu, message, seen, fix)


def _enabled(*, on: bool) -> str:
    return "Enabled" if on else "Disabled"


def no_room(gpu: PciAddress, asked: str, why: str, fix: str, *seen: Seen) -> Reason:
    """More vGPUs are desired than the GPU can carry."""
    return refusals.no_room(gpu, f"has no room for {asked}: {why}", fix, *seen)


def too_many(
    gpu: PciAddress, desired: Mapping[VgpuType, int], most: int, *, added: int = 0, most_equal: int | None = None
) -> Reason:
    """The framebuffer has room for fewer vGPUs; `added`: how many a command adds to the existing ones.

    `most_equal`: how many fit in equal-size mode, for a GPU in mixed-size mode.
    """
    mode, instead = "" if most_equal is None else " in mixed-size mode", ""
    if most_equal is not None and most_equal > most:
        instead = f"; or apply a vGPU config with `sizes: equal`: {most_equal} fit in equal-size mode"
    if added:
        existing = sum(desired.values()) - added
        fix = f"create {most - existing} or fewer" if most > existing else "remove one first: gpuvirt vgpu delete VGPU"
        return no_room(
            gpu, f"{added} more {' or '.join(desired)}", f"{existing} exist and {most} fit{mode}", fix + instead
        )
    fix = f"name {most} or fewer in the vGPU config"
    return no_room(gpu, counted(desired), f"at most {most} of that size fit{mode}", fix + instead)


def counted(asked: Mapping[VgpuType, int] | Mapping[str, int]) -> str:
    """Return how many of each are desired."""
    return ", ".join(f"{number} {name}" for name, number in sorted(asked.items()))


def no_such_type(gpu: PciAddress, desired: str, known: Collection[str]) -> Reason:
    """Another card has the type, or a newer vGPU manager."""
    message = f"has no vGPU type {desired}"
    fix = "name one of these (gpuvirt vgpu types), or install a vGPU manager that has the type"
    return Reason(ReasonCode.NO_SUCH_TYPE, gpu, message, (Seen("its types", ", ".join(sorted(known)) or "none"),), fix)


def display_mode(function: PciFunction) -> Reason:
    """The card shows pictures, so that it has no functions for vGPUs."""
    why = "it is in display mode, in which it has no VFs"
    seen = Seen(sysfs.device_path(function.address, "class"), f"0x{function.class_code:06x}")
    absent = Seen.absent(sysfs.device_path(function.address, "sriov_totalvfs"))
    fix = (
        "switch the card's display mode off by NVIDIA's displaymodeselector (--gpumode physical_display_disabled), and"
        " reboot"
    )
    return _no_host(function.address, why, fix, seen, absent)


def no_vgpu_host(function: PciFunction, why: str) -> Reason:
    """The GPU's driver creates no vGPUs."""
    fix = "install the driver of the vendor's vGPU manager, and see gpuvirt doctor"
    if function.on_vfio or function.is_idle:
        fix = f"bind it to its native driver: gpuvirt vfio unbind {function.address}, or gpuvirt vgpu apply --rebind"
        if function.driver is None and function.id.vendor == NVIDIA:
            fix += f" (not on a host with NVSwitches; there, {notoffered.probe_command(function.address)})"
    return _no_host(function.address, why, fix, driver_link(function.address, function.driver))


def no_vgpu_manager(function: PciFunction, why: str) -> Reason:
    """The host has NVIDIA's datacenter driver, which creates no vGPUs."""
    seen = driver_link(function.address, function.driver), Seen.absent(sysfs.VGPU_MANAGER)
    fix = "install NVIDIA's vGPU manager in place of its usual driver; if it is installed: modprobe nvidia_vgpu_vfio"
    return _no_host(function.address, why, fix, *seen)


def driver_not_loaded(gpu: PciAddress) -> Reason:
    """The GPU's native driver may be the vGPU manager's, or the datacenter driver."""
    why = "NVIDIA's driver is not loaded, so it is not known whether it is the vGPU manager's, which creates vGPUs"
    fix = "check that NVIDIA's vGPU manager is installed on this host (modinfo nvidia_vgpu_vfio), or install it"
    places = Seen.absent(sysfs.NVIDIA_VERSION), Seen.absent(sysfs.VGPU_MANAGER)
    return _no_host(gpu, why, fix, *places, what="may not carry vGPUs")


def vfs_off(gpu: PciAddress) -> Reason:
    """The GPU has no VFs yet, of which each carries a vGPU."""
    fix = f"gpuvirt vgpu create {gpu} TYPE, gpuvirt vgpu apply, or the agent for a vGPU config, switches them on"
    seen = Seen(sysfs.device_path(gpu, "sriov_numvfs"), "0")
    return _no_host(gpu, "its VFs are off", fix, seen, what="carries no vGPUs and lists no types yet")


def gone(gpu: PciAddress) -> Reason:
    """The GPU was unplugged, or never existed."""
    fix = "gpuvirt devices lists the GPUs"
    return _no_host(gpu, "this host has no such GPU", fix, Seen.absent(sysfs.device_path(gpu)))


def _no_host(gpu: PciAddress, why: str, fix: str, *seen: Seen, what: str = "can't carry vGPUs") -> Reason:
    return Reason(ReasonCode.NO_VGPU_HOST, gpu, f"{what}: {why}", seen, fix)


def type_rejected(parent: PciAddress, seen: Seen) -> Reason:
    """A VF rejects a type that it lists."""
    message = "rejected a vGPU type that it lists as creatable, and is not used"
    fix = "switch SR-IOV off and on when none of the GPU's VFs is in use; see the kernel's log (dmesg)"
    return Reason(ReasonCode.VF_REJECTED_TYPE, parent, message, (seen,), fix)

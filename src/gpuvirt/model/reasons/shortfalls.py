"""Why a GPU does not carry the desired vGPUs."""

from collections.abc import Collection, Mapping, Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import LiveVgpu
from gpuvirt.model.reasons import refusals
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
    return _in_use(vgpu.id, f"{why}, and stays while it is in use: {', '.join(users)}", seen)


def _in_use(subject: str, message: str, *seen: Seen) -> Reason:
    return Reason(ReasonCode.VGPU_IN_USE, subject, message, seen, "stop those users; the GPU is then changed")


def vgpu_keeps_mode(vgpu: LiveVgpu, users: Sequence[str], step: str) -> Reason:
    """A GPU can change its mode only while it carries no vGPU."""
    return vgpu_in_use(vgpu, users, f"prevents a change of its GPU's mode ({step})")


def vgpu_keeps_instances(vgpu: LiveVgpu, users: Sequence[str], kind: str) -> Reason:
    """The host does not show on which of several equal instances a vGPU is."""
    return vgpu_in_use(vgpu, users, f"is on an unknown one of its GPU's {kind} instances, so all of them stay")


def scheduler_waits(gpu: PciAddress, users: Sequence[str], desired: str) -> Reason:
    """The driver accepts another scheduler only while no VM runs."""
    return _in_use(gpu, f"gets its scheduler ({desired}) when no VM runs on it; now running: {', '.join(users)}")


def not_empty(gpu: PciAddress, existing: Sequence[str]) -> Reason:
    """A vGPU has been created since the plan."""
    return refusals.failed(f"other vGPUs have just been created on it: {', '.join(existing)}", gpu, fix=OTHER_MAKERS)


def not_nearer(gpu: str, rounds: int) -> Reason:
    """Another program undoes what the steps do."""
    return refusals.failed(
        f"the vGPUs are not as desired after {rounds} rounds of steps without an error", gpu, fix=OTHER_MAKERS
    )


def modes_differ(gpu: PciAddress, types: Sequence[VgpuType]) -> Reason:
    """A GPU is either in MIG mode or time-sliced."""
    message = f"can't carry time-sliced and MIG-backed vGPUs at once: {', '.join(types)}"
    fix = "name types of one kind for a GPU in the vGPU config"
    return refusals.mode_unsupported(gpu, message, fix)


def no_mode(gpu: PciAddress, mode: str, field: str, value: str) -> Reason:
    """The card or its driver has no such mode."""
    message = f"has no {mode}, which the desired vGPUs need"
    fix = "name other types in the vGPU config, without `sizes: mixed`; or install a vGPU manager that has the mode"
    return refusals.mode_unsupported(gpu, message, fix, Seen(SMI, f"{field}: {value}"))


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


def too_many(gpu: PciAddress, desired: Mapping[VgpuType, int], most: int) -> Reason:
    """The framebuffer has room for fewer vGPUs."""
    return no_room(
        gpu, _counts(desired), f"at most {most} of that size fit", f"name {most} or fewer in the vGPU config"
    )


def split_already(gpu: PciAddress, desired: Mapping[VgpuType, int]) -> Reason:
    """PCI Express switches all VFs of a GPU on and off together."""
    fix = f"when no VM uses a VF: gpuvirt vgpu delete {gpu}; then create the new number of VFs"
    return no_room(gpu, " and ".join(sorted(desired)), "a GPU is split into VFs of one size, all at once", fix)


def no_room_mixed(gpu: PciAddress, desired: Mapping[VgpuType, int]) -> Reason:
    """The sizes find no placements side by side."""
    why = "they don't fit side by side in mixed-size mode"
    return no_room(gpu, _counts(desired), why, "name fewer vGPUs, or vGPUs of one size, of which more fit")


def no_slices(gpu: PciAddress, needed: Mapping[str, int]) -> Reason:
    """The GPU instances don't fit side by side."""
    fix = "name fewer or smaller vGPUs in the vGPU config"
    return no_room(gpu, f"the GPU instances {_counts(needed)}", "they don't fit side by side", fix)


def instance_unknown(gpu: PciAddress, vgpu_type: VgpuType) -> Reason:
    """The catalog does not have the card's type."""
    why = "no GPU instance is left for this type, and the profile that it needs is not known"
    fix = f"create the instances by hand: nvidia-smi mig -i {gpu} -lgip, then -cgi PROFILE"
    return no_room(gpu, vgpu_type, why, fix)


def no_parent(gpu: PciAddress, short: int) -> Reason:
    """The GPU has too few VFs."""
    fix = "name fewer in the vGPU config, or see why VFs are missing or reject types: gpuvirt doctor"
    seen = Seen(sysfs.device_path(gpu, "virtfn*"), f"{short} too few")
    return no_room(gpu, f"{short} of the desired vGPUs", "each needs its own VF", fix, seen)


def _counts(asked: Mapping[VgpuType, int] | Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(asked.items()))


def sizes_differ(gpu: PciAddress, types: Sequence[VgpuType]) -> Reason:
    """The vGPUs of a GPU have one size where mixed sizes are not set."""
    message = f"can't carry vGPUs of several sizes, since mixed sizes are not switched on: {', '.join(types)}"
    fix = "name one size in the vGPU config, or on cards with mixed sizes: sizes: mixed"
    return Reason(ReasonCode.SIZES_DIFFER, gpu, message, fix=fix)


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
    return _no_host(function.address, why, fix, driver_link(function.address, function.driver))


def gone(gpu: PciAddress) -> Reason:
    """The GPU was unplugged, or never existed."""
    fix = "gpuvirt devices lists the GPUs"
    return _no_host(gpu, "this host has no such GPU", fix, Seen.absent(sysfs.device_path(gpu)))


def _no_host(gpu: PciAddress, why: str, fix: str, *seen: Seen) -> Reason:
    return Reason(ReasonCode.NO_VGPU_HOST, gpu, f"can't carry vGPUs: {why}", seen, fix)


def type_rejected(parent: PciAddress, seen: Seen) -> Reason:
    """A VF rejects a type that it lists."""
    message = "rejected a vGPU type that it lists as creatable, and is not used"
    fix = "switch SR-IOV off and on when none of the GPU's VFs is in use; see the kernel's log (dmesg)"
    return Reason(ReasonCode.VF_REJECTED_TYPE, parent, message, (seen,), fix)


def program_missing(gpu: PciAddress, program: str, step: str, error: str) -> Reason:
    """A program that a later step of the change needs is not installed."""
    message = f"keeps its vGPUs, since a later step needs {program}, which is not installed: {step}"
    fix = (
        "install NVIDIA's vGPU manager on the host, or check that its container runs on this node (label"
        " nvidia.com/gpu.deploy.vgpu-manager=true)"
    )
    return refusals.prerequisite_missing(gpu, message, fix, Seen("", error))


def device_plugin_still_running(subject: str, labels: Collection[str], pods: Collection[str]) -> Reason:
    """Another operator's device plugin or validator would offer or open the devices that are changed."""
    return Reason(
        ReasonCode.DEVICE_PLUGIN_STILL_RUNNING,
        subject,
        "waits until the device plugin and the validator of the other operator have left this node",
        (*(Seen("label", label) for label in labels), *(Seen("pod", pod) for pod in pods))
        or (Seen("", "neither the node's labels nor its pods have been reported yet"),),
        "no action needed: their operator removes them by the labels; if a pod stays, see why it does not end",
    )


def scheduler_unfit(gpu: PciAddress, message: str, seen: str, fix: str) -> Reason:
    """The GPU's mode, or the time slice, rules the scheduler out."""
    return Reason(ReasonCode.SCHEDULER_UNFIT, gpu, message, (Seen("", seen),), fix)


def option_elsewhere(gpu: PciAddress, parameter: str, place: Seen, fix: str) -> Reason:
    """The kernel takes one value of a parameter."""
    message = (
        f"loses its scheduler at the next load of the driver: {parameter} is set in another file too, and the driver"
        " accepts one value"
    )
    return Reason(ReasonCode.OPTION_ELSEWHERE, gpu, message, (place,), fix)

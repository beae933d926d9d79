"""Why a GPU does not carry the vGPUs that are wanted of it: each a reason with what was seen, where, and the fix."""

from collections.abc import Collection, Mapping, Sequence

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import LiveVgpu
from gpuvirt.model.reasons import Reason, ReasonCode


def unread(subject: str, odd: Unread) -> Reason:
    """What it carries is not known, and nothing follows from what is not known."""
    return Reason(
        ReasonCode.UNREAD,
        subject,
        "can't be carved, since what it carries could not be read",
        seen=f"{odd.path}: {odd.said}",
        fix="look at the kernel's log for that device",
    )


def vgpu_in_use(one: LiveVgpu, users: Sequence[str]) -> Reason:
    """A machine would lose it."""
    return Reason(
        ReasonCode.VGPU_IN_USE,
        one.id,
        f"is no longer wanted, and stays for as long as it is in use: {', '.join(users)}",
        seen=f"{one.type} on {one.slot}",
        fix="end its user in good order; it is removed then",
    )


def pods_unheard(gpu: PciAddress) -> Reason:
    """A pod may have what is to go."""
    return Reason(
        ReasonCode.ALLOCATIONS_UNKNOWN,
        gpu,
        "carries vGPUs that are no longer wanted, and it is not known yet whether a pod has them",
        fix="nothing, as a rule: the kubelet is asked at once; else see what keeps it from being heard",
    )


def still_counted(gpu: PciAddress, vgpus: Sequence[VgpuId]) -> Reason:
    """A pod could be admitted by them at any moment."""
    return Reason(
        ReasonCode.STILL_ALLOCATABLE,
        gpu,
        "carries vGPUs that are no longer wanted, and the kubelet has not yet taken them off what it admits pods by",
        seen=f"GetAllocatableResources: {', '.join(vgpus)}",
        fix="nothing, as a rule: it takes a second; else see which plugin still offers them",
    )


def vgpu_keeps_mode(one: LiveVgpu, users: Sequence[str], step: str) -> Reason:
    """A GPU changes its mode while it carries nothing."""
    return Reason(
        ReasonCode.VGPU_IN_USE,
        one.id,
        f"is in use, and its GPU can't change its mode for as long as it carries anything: {', '.join(users)}",
        seen=f"{one.type} on {one.slot}; waiting: {step}",
        fix="end its user in good order; the GPU is changed then",
    )


def vgpu_keeps_instances(one: LiveVgpu, users: Sequence[str], kind: str) -> Reason:
    """Which instance it stands on is not told by anything."""
    return Reason(
        ReasonCode.VGPU_IN_USE,
        one.id,
        f"is in use, and it can't be told on which of its GPU's {kind} instances, so that all of them stay:"
        f" {', '.join(users)}",
        seen=f"{one.type} on {one.slot}",
        fix="end its user in good order; the instances that are too many make room then",
    )


def not_empty(gpu: PciAddress, there: Sequence[str]) -> Reason:
    """Somebody has made a vGPU meanwhile."""
    return Reason(
        ReasonCode.STEP_FAILED,
        gpu,
        f"can't be changed further, since somebody has just made vGPUs on it: {', '.join(there)}",
        fix="see who else makes vGPUs on this host: another device manager, KubeVirt's own mediated devices",
    )


def scheduler_waits(gpu: PciAddress, users: Sequence[str], wanted: str) -> Reason:
    """The driver takes another scheduler while no machine runs."""
    return Reason(
        ReasonCode.VGPU_IN_USE,
        gpu,
        f"gets its scheduler ({wanted}) when no machine runs on it: {', '.join(users)}",
        fix="end the machines in good order; it is set then",
    )


def modes_differ(gpu: PciAddress, types: Sequence[VgpuType]) -> Reason:
    """A GPU is cut into instances, or its time is shared."""
    return Reason(
        ReasonCode.MODE_UNSUPPORTED,
        gpu,
        f"is to carry time-sliced and MIG-backed vGPUs, and is in one mode at a time: {', '.join(types)}",
        fix="want types of one kind on a GPU",
    )


def no_mode(gpu: PciAddress, mode: str, seen: str) -> Reason:
    """Its card or its driver has no such mode."""
    return Reason(
        ReasonCode.MODE_UNSUPPORTED,
        gpu,
        f"can't be in {mode}, which what is wanted of it needs",
        seen=f"nvidia-smi -q: {seen}",
        fix="want other types, without `sizes: mixed`; or install a vGPU manager that has that mode for the card",
    )


def mode_pending(gpu: PciAddress, *, on: bool) -> Reason:
    """The driver has taken note of it, and the GPU has not."""
    return Reason(
        ReasonCode.MODE_PENDING,
        gpu,
        f"has MIG mode {'on' if on else 'off'} only after a reset, or when the host is started again",
        seen=f"nvidia-smi -q: MIG Mode / Current: {_enabled(on=not on)}, Pending: {_enabled(on=on)}",
        fix=f"when nobody uses it: nvidia-smi --gpu-reset -i {gpu}; or reboot the host",
    )


def _enabled(*, on: bool) -> str:
    return "Enabled" if on else "Disabled"


def no_slices(gpu: PciAddress, needed: Mapping[str, int]) -> Reason:
    """The instances don't fit side by side."""
    asked = ", ".join(f"{number} {profile}" for profile, number in sorted(needed.items()))
    return Reason(
        ReasonCode.NO_ROOM,
        gpu,
        f"would need more GPU instances than fit on it: {asked}",
        fix="want fewer, or smaller ones",
    )


def no_room_mixed(gpu: PciAddress, wanted: Mapping[VgpuType, int]) -> Reason:
    """They find no placements side by side."""
    asked = ", ".join(f"{number} {vgpu_type}" for vgpu_type, number in sorted(wanted.items()))
    return Reason(
        ReasonCode.NO_ROOM,
        gpu,
        f"is to carry {asked}, which don't fit side by side in mixed-size mode",
        fix="want fewer; fewer of some sizes fit than where all have one size",
    )


def instance_unknown(gpu: PciAddress, vgpu_type: VgpuType) -> Reason:
    """The catalog does not have the card's type."""
    return Reason(
        ReasonCode.NO_ROOM,
        gpu,
        f"has no GPU instance left for {vgpu_type}, and it is not known here on which that stands",
        fix=f"make the instances by hand: nvidia-smi mig -i {gpu} -lgip, then -cgi PROFILE",
    )


def vgpu_leaving(gpu: PciAddress, vgpu: VgpuId) -> Reason:
    """Somebody removes what a machine still has."""
    return Reason(
        ReasonCode.UNBIND_PENDING,
        gpu,
        f"does not show vGPU {vgpu} any more, which a pod has: somebody is removing it, and its place is still taken",
        seen=f"/sys/bus/mdev/devices/{vgpu}: not there",
        fix="end the pod in good order; nothing else can be done to that vGPU",
    )


def sizes_differ(gpu: PciAddress, types: Sequence[VgpuType]) -> Reason:
    """Vgpus of one GPU have one size, unless told otherwise."""
    return Reason(
        ReasonCode.SIZES_DIFFER,
        gpu,
        f"is to carry vGPUs of several sizes, and mixed sizes are not switched on: {', '.join(types)}",
        fix="want one size, or on cards that can: sizes: mixed",
    )


def too_many(gpu: PciAddress, wanted: Mapping[VgpuType, int], most: int) -> Reason:
    """More than its framebuffer holds."""
    asked = ", ".join(f"{number} {vgpu_type}" for vgpu_type, number in sorted(wanted.items()))
    return Reason(
        ReasonCode.NO_ROOM,
        gpu,
        f"is to carry {asked}, and at most {most} of that size fit",
        fix=f"want {most} or fewer",
    )


def no_slot(gpu: PciAddress, short: int) -> Reason:
    """It has too few VFs."""
    return Reason(
        ReasonCode.NO_ROOM,
        gpu,
        f"has no place for {short} of the vGPUs that it is to carry: each takes a VF of its own",
        seen=f"/sys/bus/pci/devices/{gpu}/virtfn*",
        fix="want fewer, or see why VFs are missing or refuse types: gpuvirt doctor",
    )


def no_such_type(gpu: PciAddress, wished: str, known: Collection[str]) -> Reason:
    """The card is another, or NVIDIA's manager an older one."""
    shown = ", ".join(sorted(known)) or "none"
    return Reason(
        ReasonCode.NO_SUCH_TYPE,
        gpu,
        f"knows no vGPU type {wished}",
        seen=f"its types: {shown}",
        fix="want one of these (gpuvirt vgpu types), or install a vGPU manager that has it",
    )


def no_vgpu_host(function: PciFunction, why: str) -> Reason:
    """No driver is there that makes vGPUs."""
    return Reason(
        ReasonCode.NO_VGPU_HOST,
        function.address,
        f"can't be carved: {why}",
        seen=f"/sys/bus/pci/devices/{function.address}/driver -> {function.driver or 'none'}",
        fix=f"give it to its native driver: gpuvirt vfio unbind {function.address}, or gpuvirt vgpu apply --rebind"
        if function.on_vfio or function.is_idle
        else "install the driver of the vendor's vGPU manager, and see gpuvirt doctor",
    )


def gone(gpu: PciAddress) -> Reason:
    """It was unplugged, or was never there."""
    return Reason(
        ReasonCode.NO_VGPU_HOST, gpu, "can't be carved: no such GPU is on this host", fix="see: gpuvirt devices"
    )


def not_holdable(subject: str) -> Reason:
    """Nobody can be kept from starting to use it meanwhile."""
    return Reason(
        ReasonCode.NO_IOMMU_GROUP,
        subject,
        "can't be held while it goes, since it is in no IOMMU group that is known",
        fix="end all that use vGPUs of its GPU, and remove it by hand",
    )


def slot_refused(slot: PciAddress, said: str) -> Reason:
    """A VF does not take what it offers."""
    return Reason(
        ReasonCode.VF_REJECTED_TYPE,
        slot,
        "refused a vGPU type that it had offered, and is passed over",
        seen=said,
        fix="switch SR-IOV off and on when none of the GPU's VFs is in use; see the kernel's log",
    )


def program_missing(gpu: PciAddress, program: str, step: str, said: str) -> Reason:
    """Return why a GPU keeps its vGPUs: a later step of the change needs a program of NVIDIA's."""
    return Reason(
        ReasonCode.PREREQUISITE_MISSING,
        gpu,
        f"keeps its vGPUs, since a later step needs {program}, which is not installed: {step}",
        seen=said,
        fix="install NVIDIA's vGPU manager on the host, or see that its container runs on this node (label"
        " nvidia.com/gpu.deploy.vgpu-manager=true)",
    )


def not_nearer(gpu: str, rounds: int) -> Reason:
    """What is done does not last."""
    return Reason(
        ReasonCode.STEP_FAILED,
        gpu,
        f"does not carry what is wanted after {rounds} rounds of steps that all went well",
        fix="see who else makes or removes vGPUs on this host: another device manager, KubeVirt's own mediated devices",
    )

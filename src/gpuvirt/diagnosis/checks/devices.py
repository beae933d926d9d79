"""Checks of GPUs and vGPUs: the reasons against them, and whether the vGPU manager lists types and has enabled VFs."""

from collections.abc import Iterator

from gpuvirt.diagnosis.checks.drivers import branch_of
from gpuvirt.diagnosis.evidence import Evidence, kernel_series
from gpuvirt.diagnosis.findings import Finding, fine, of_reason, problem, seen
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.sysfs import MDEV_PARENTS, VGPU_MANAGER, device_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.workload import VGPU_CONFIG_LABEL
from gpuvirt.model.devices.candidates import why_no_vgpus
from gpuvirt.model.inventory.inventory import Gpu, Mode
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, count_of, shortfalls
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Series

VFIO_KERNEL, VFIO_BRANCH = (6, 8), 550
"""From this kernel on, vGPUs need this branch of the driver, vGPU 17, which has its own VFIO driver."""


def vgpus(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU that can carry vGPUs has vGPUs, or gets them on demand."""
    on_demand = {gpu.address for gpu in evidence.view.gpus if evidence.creatable_on_demand(gpu)}
    for gpu in evidence.inventory.gpus.values():
        host = gpu.vgpu_host
        if host is None or gpu.function.on_vfio:
            continue
        if host.live:
            kind = "mediated devices" if host.framework is Framework.MDEV else "VFs with a vGPU type"
            yield fine(gpu.function.address, f"carries {count_of(len(host.live), 'vGPU')} ({kind})")
        elif gpu.function.address in on_demand:
            yield fine(gpu.function.address, "is empty: in mode on-demand a vGPU is created when a pod starts")
        else:
            yield of_reason(
                why_no_vgpus(evidence.inventory, gpu.function, host),
                Level.WARNING,
                why="no VM can use the GPU in this state",
            )


def _made_by(evidence: Evidence, gpu: Gpu, name: str) -> tuple[str, ...]:
    """Return what makes vGPUs of a type on a GPU: the agent by the node's label, or a command."""
    if evidence.view.agent is not None:
        return (f"kubectl label --overwrite node {evidence.node} {VGPU_CONFIG_LABEL}={name}",)
    return (f"gpuvirt vgpu create {gpu.function.address} {name}",)


def vgpu_manager(evidence: Evidence) -> Iterator[Finding]:
    """Where NVIDIA's vGPU manager runs, its GPUs list vGPU types."""
    manager = evidence.inventory.facts.platform.vgpu_manager
    managed = manager is True
    for gpu in evidence.inventory.gpus.values():
        function = gpu.function
        if gpu.mode is not Mode.CONTAINER or function.id.vendor != NVIDIA or function.driver != "nvidia":
            continue
        total = function.sriov_total_vfs or 0
        if managed and total and not function.virtfns:
            yield _vfs_off(evidence, gpu, total)
        elif managed or function.virtfns:
            yield _no_types(evidence, gpu)
        elif not isinstance(manager, Unread):
            yield fine(function.address, "is on nvidia without the vGPU manager: the host and containers use it")


def _vfs_off(evidence: Evidence, gpu: Gpu, total: int) -> Finding:
    address = gpu.function.address
    name = _largest_type(gpu) or "TYPE"
    return problem(
        FindingCode.VFS_OFF,
        address,
        f"has its VFs disabled, 0 of {total}, and lists no vGPU type",
        (Seen(device_path(address, "virtfn*"), "none"), Seen(VGPU_MANAGER, "loaded")),
        why="since Ampere, vGPUs are created on VFs",
        fix=(
            f"# switches on the VFs; what is missing for that, and then the types: gpuvirt vgpu types {address}",
            *_made_by(evidence, gpu, name),
        ),
    )


def _largest_type(gpu: Gpu) -> str | None:
    """Return the type that gives a VM most of a GPU; None where the GPU's ids leave open which card it is."""
    cards = catalog.cards_of(gpu.function.id, gpu.function.subsystem)
    profiles = [kind.profile for card in cards for kind in card.types() if not kind.profile.is_mig]
    if len(cards) != 1 or not profiles:
        return None
    return max(profiles, key=lambda profile: (profile.series is Series.Q, profile.gb)).text


def _no_types(evidence: Evidence, gpu: Gpu) -> Finding:
    if catalog.in_display_mode(gpu.function):
        reason = shortfalls.display_mode(gpu.function)
        return of_reason(reason, reason.code.level)
    version, release = evidence.inventory.facts.platform.nvidia_version or "", evidence.setup.release
    is_old = branch_of(version) < VFIO_BRANCH and kernel_series(release.text or "", (0, 0)) >= VFIO_KERNEL
    address, managed = gpu.function.address, evidence.inventory.facts.platform.vgpu_manager is True
    module = "loaded" if managed else "not loaded"
    return problem(
        FindingCode.NO_VGPU_TYPES,
        address,
        "is on nvidia and set up for vGPUs, but lists no vGPU type",
        (
            Seen(VGPU_MANAGER, module),
            Seen(
                f"{device_path(address)}/virtfn*", f"{len(gpu.function.virtfns)} of {gpu.function.sriov_total_vfs or 0}"
            ),
            Seen.absent(f"{MDEV_PARENTS}/{address}"),
            *((Seen("/sys/module/nvidia/version", version), *seen(release)) if is_old else ()),
        ),
        why="without vGPU types the GPU can't carry vGPUs",
        fix=(f"install vGPU 17 or later: driver {version} is older than the kernel's interface for vGPUs",)
        if is_old
        else (
            "nvidia-smi vgpu -s; systemctl status nvidia-vgpu-mgr",
            "check that the card supports vGPUs and is not in graphics mode (displaymodeselector)",
        )
        if managed
        else ("install NVIDIA's vGPU manager (the package vgpu-kvm of the vGPU release) in place of its usual driver",),
    )


def sriov(evidence: Evidence) -> Iterator[Finding]:
    """No GPU for passthrough has its VFs enabled."""
    for shown in evidence.view.gpus:
        enabled = (reason for reason in shown.reasons if reason.code is ReasonCode.VFS_ENABLED)
        yield from (of_reason(reason, Level.WARNING) for reason in enabled)
    counted = [
        f"{gpu.function.address} {len(gpu.function.virtfns)} of {gpu.function.sriov_total_vfs}"
        for gpu in evidence.inventory.gpus.values()
        if gpu.function.sriov_total_vfs and gpu.function.virtfns
    ]
    if counted:
        yield fine("VFs", f"are enabled: {', '.join(counted)}")


OF_OTHER_CHECKS = frozenset(
    {
        ReasonCode.BAR_UNASSIGNED,
        ReasonCode.BOOT_CONSOLE,
        ReasonCode.GRACE_DRIVER_MISSING,
        ReasonCode.GROUP_NOT_VIABLE,
        ReasonCode.NO_VGPUS,
        ReasonCode.VFS_ENABLED,
    }
)
"""Reasons that other checks report in more detail, under the same code."""


def devices(evidence: Evidence) -> Iterator[Finding]:
    """No GPU and no vGPU has a reason against it."""
    view = evidence.view
    if not view.gpus:
        yield fine("this host", "has no GPU of NVIDIA, AMD or Intel")
    offered = sum(gpu.offered_as is not None for gpu in view.gpus)
    vgpus = [vgpu for gpu in view.gpus for vgpu in gpu.vgpus]
    if view.gpus:
        offered_vgpus = sum(vgpu.offered_as is not None for vgpu in vgpus)
        message = f"found: {offered} offered whole, and {count_of(offered_vgpus, 'vGPU')} offered"
        yield fine(count_of(len(view.gpus), "GPU"), message)
    no_groups = evidence.setup.iommu_groups.known == ()  # a check of the host reports it
    # A GPU on its native driver is fine, unless the settings want it to be offered whole.
    astray = {gpu.address for gpu in view.gpus if evidence.desired_of(gpu) == DesiredMode.PASSTHROUGH}
    for reason in dict.fromkeys(_reasons(evidence)):
        is_of_host = no_groups and reason.code is ReasonCode.NO_IOMMU_GROUP
        if reason.code not in OF_OTHER_CHECKS and not is_of_host:
            is_astray = reason.code is ReasonCode.NATIVE_DRIVER and reason.subject in astray
            yield of_reason(reason, Level.WARNING if is_astray else reason.code.level)


def _reasons(evidence: Evidence) -> Iterator[Reason]:
    for gpu in evidence.view.gpus:
        yield from gpu.reasons
        for vgpu in gpu.vgpus:
            yield from vgpu.reasons
    for function in evidence.view.functions:
        if function.offered_as is not None:
            yield from function.reasons
    yield from evidence.view.problems

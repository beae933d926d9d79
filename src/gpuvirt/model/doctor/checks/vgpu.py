"""Checks of vGPUs: whether the host's manager offers types, whether VFs are on, whether any vGPU was made."""

from collections.abc import Iterator

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.sysfs import MDEV_PARENTS, device_path
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, of_reason, problem
from gpuvirt.model.inventory.inventory import Gpu, Mode
from gpuvirt.model.reasons import FindingCode, ReasonCode, Seen
from gpuvirt.model.reasons.codes import Level

MANAGER = "nvidia_vgpu_vfio"
"""The module that NVIDIA's vGPU manager brings, and its other drivers don't."""


def vgpus(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU that can carry vGPUs carries some."""
    for gpu in evidence.inventory.gpus.values():
        host = gpu.vgpu_host
        if host is None or gpu.function.on_vfio:
            continue
        if host.live:
            kind = "mediated devices" if host.framework is Framework.MDEV else "VFs that carry a type"
            yield fine(gpu.function.address, f"carries {len(host.live)} vGPUs ({kind})")
        else:
            yield _without(gpu, host)


def _without(gpu: Gpu, host: VgpuHost) -> Finding:
    free = next(
        ((slot, name) for slot, types in host.slots.items() for name, count in sorted(types.items()) if count > 0), None
    )
    lines: tuple[str, ...] = ("free what holds its capacity: no type can be made now",)
    if free is not None:
        lines = (f"# {free[1]}, or another type of those it can carry", *_make(host, *free))
    types = sorted({name for types in host.slots.values() for name, count in types.items() if count > 0})
    folder = "mdev_supported_types" if host.framework is Framework.MDEV else "virtfn*/nvidia/creatable_vgpu_types"
    return Finding(
        Level.WARNING,
        gpu.function.address,
        "could carry vGPUs, but has none",
        ReasonCode.NO_VGPUS,
        (Seen(f"{device_path(gpu.function.address)}/{folder}", ", ".join(types) or "no type is free"),),
        why="as it stands nothing of it can be given to a machine",
        fix=(*lines, f"or give it away whole: gpuvirt vfio bind {gpu.function.address}"),
    )


def _make(host: VgpuHost, slot: PciAddress, name: VgpuType) -> tuple[str, ...]:
    """Return the commands that make a vGPU of a type."""
    if host.framework is Framework.MDEV:
        return (
            f"cd {MDEV_PARENTS}/{slot}/mdev_supported_types",
            f"uuidgen > $(dirname $(grep -lx '{name}' */name))/create",
        )
    ids = {type_name: type_id for type_id, type_name in host.type_names.items()}
    return (f"echo {ids.get(name, 'TYPE')} > {device_path(slot)}/nvidia/current_vgpu_type",)


def vgpu_manager(evidence: Evidence) -> Iterator[Finding]:
    """Where NVIDIA's vGPU manager runs, its GPUs offer types."""
    managed = MANAGER in evidence.setup.modules.known
    for gpu in evidence.inventory.gpus.values():
        function = gpu.function
        if gpu.mode is not Mode.CONTAINER or function.id.vendor != NVIDIA or function.driver != "nvidia":
            continue
        total = function.sriov_total_vfs or 0
        if managed and total and not function.virtfns:
            yield _vfs_off(gpu, total)
        elif managed or function.virtfns:
            yield _no_types(evidence, gpu)
        elif not isinstance(evidence.setup.modules.names, Unread):
            yield fine(function.address, "has nvidia without the vGPU manager: it serves the host and containers")


def _vfs_off(gpu: Gpu, total: int) -> Finding:
    address = gpu.function.address
    return problem(
        FindingCode.VFS_OFF,
        address,
        f"has its VFs switched off, 0 of {total}, and offers no vGPU type",
        (Seen(device_path(address, "virtfn*"), "none"), Seen(f"/sys/module/{MANAGER}", "loaded")),
        why="from Ampere on, vGPUs are made on VFs",
        fix=(f"/usr/lib/nvidia/sriov-manage -e {address}",),
    )


def _no_types(evidence: Evidence, gpu: Gpu) -> Finding:
    address, managed = gpu.function.address, MANAGER in evidence.setup.modules.known
    why_not = "loaded" if managed else "not there"
    return problem(
        FindingCode.NO_VGPU_TYPES,
        address,
        "is on nvidia, set up for vGPUs, and offers no type of them",
        (
            Seen(f"/sys/module/{MANAGER}", why_not),
            Seen(
                f"{device_path(address)}/virtfn*", f"{len(gpu.function.virtfns)} of {gpu.function.sriov_total_vfs or 0}"
            ),
            Seen(f"{MDEV_PARENTS}/{address}", "not there"),
        ),
        why="without types nothing of it can be given to a machine",
        fix=(
            "nvidia-smi vgpu -s; systemctl status nvidia-vgpu-mgr",
            "see that the card is one for vGPUs and is not in graphics mode (displaymodeselector)",
        )
        if managed
        else ("install NVIDIA's vGPU manager (the package vgpu-kvm of the vGPU release) in place of its usual driver",),
    )


def sriov(evidence: Evidence) -> Iterator[Finding]:
    """No GPU that is to be given away whole has its VFs on."""
    for shown in evidence.view.gpus:
        yield from (of_reason(one, Level.WARNING) for one in shown.reasons if one.code is ReasonCode.VFS_ENABLED)
    counted = [
        f"{gpu.function.address} {len(gpu.function.virtfns)} of {gpu.function.sriov_total_vfs}"
        for gpu in evidence.inventory.gpus.values()
        if gpu.function.sriov_total_vfs and gpu.function.virtfns
    ]
    if counted:
        yield fine("VFs", f"are on: {', '.join(counted)}")

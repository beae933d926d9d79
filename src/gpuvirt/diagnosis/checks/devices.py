"""Checks of the devices: the reasons that `gpuvirt devices` prints, with their codes and words."""

from collections.abc import Iterator

from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, number_of_gpus, of_reason
from gpuvirt.model.reasons import Reason, ReasonCode

OF_OTHER_CHECKS = frozenset(
    {
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
        yield fine(number_of_gpus(len(view.gpus)), f"found: {offered} offered whole, and {offered_vgpus} vGPUs offered")
    for reason in _reasons(evidence):
        if reason.code not in OF_OTHER_CHECKS and not _is_of_host(evidence, reason):
            yield of_reason(reason, reason.code.level)


def _is_of_host(evidence: Evidence, reason: Reason) -> bool:
    """Return whether a reason holds for all devices, so that a check of the host reports it."""
    return reason.code is ReasonCode.NO_IOMMU_GROUP and evidence.setup.iommu_groups.known == ()


def _reasons(evidence: Evidence) -> Iterator[Reason]:
    for gpu in evidence.view.gpus:
        yield from gpu.reasons
        for vgpu in gpu.vgpus:
            yield from vgpu.reasons
    for function in evidence.view.functions:
        if function.offered_as is not None:
            yield from function.reasons
    yield from evidence.view.problems

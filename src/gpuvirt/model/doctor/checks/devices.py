"""Checks of the devices themselves: what `gpuvirt devices` says of them, with the same codes and words."""

from collections.abc import Iterator

from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, of_reason
from gpuvirt.model.reasons import Reason, ReasonCode

SAID_ELSEWHERE = frozenset({ReasonCode.GROUP_NOT_VIABLE, ReasonCode.NO_VGPUS, ReasonCode.VFS_ENABLED})
"""Reasons of which other checks say more, under the same code."""


def devices(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU can be used as it is set up."""
    view = evidence.view
    if not view.gpus:
        yield fine("this host", "has no GPU of NVIDIA, AMD or Intel")
    offered = sum(one.offered_as is not None for one in view.gpus)
    vgpus = [vgpu for gpu in view.gpus for vgpu in gpu.vgpus]
    if view.gpus:
        parts = sum(one.offered_as is not None for one in vgpus)
        yield fine(f"{len(view.gpus)} GPUs", f"are there: {offered} offered whole, and {parts} vGPUs")
    for reason in _reasons(evidence):
        if reason.code not in SAID_ELSEWHERE and not _said_of_host(evidence, reason):
            yield of_reason(reason, reason.code.level)


def _said_of_host(evidence: Evidence, reason: Reason) -> bool:
    """Return whether a reason is the same for all devices, and is told of the host."""
    return reason.code is ReasonCode.NO_IOMMU_GROUP and evidence.setup.iommu_groups.known == ()


def _reasons(evidence: Evidence) -> Iterator[Reason]:
    for gpu in evidence.view.gpus:
        yield from gpu.reasons
        for vgpu in gpu.vgpus:
            yield from vgpu.reasons
    for function in evidence.view.functions:
        if function.offered_as is not None:
            yield from function.reasons
    yield from evidence.view.notes

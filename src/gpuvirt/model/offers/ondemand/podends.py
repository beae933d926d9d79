"""Pods that end, and the ids that are listed in the place of their vGPUs until these are gone.

The kubelet gives the id of a pod that has ended to the next pod while it is listed, so it is withdrawn at once. But the
scheduler counts a pod that has ended no more, and binds the next one at once. On a full node the kubelet itself would
refuse it, for good, while the vGPU of the ended pod is being removed. With another id in that place the pod reaches
Allocate, which waits for the removal.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress, PodUid, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.inventory.inventory import Inventory

REPLACED_S = 5.0
"""How long another id is listed in the place of an ended pod's vGPU, whose removal takes 2 s to 3 s.

A vGPU that stays longer has an open file, or its removal fails: then its place is no longer promised.
"""


class PodEnds(msgspec.Struct, frozen=True):
    """The pods of a node that end, by the API server."""

    ended: frozenset[PodUid] = frozenset()
    """Those that have run, or that the API server lacks: the scheduler counts them no more."""
    deleted: frozenset[PodUid] = frozenset()
    """Those that are being deleted and may still run."""

    @property
    def all(self) -> frozenset[PodUid]:
        """The pods whose ids are withdrawn."""
        return self.ended | self.deleted


class Replacements(msgspec.Struct, frozen=True):
    """The vGPUs of pods that have ended, and those without an allocation, until they are gone."""

    until_s: Mapping[VgpuId, float] = msgspec.field(default_factory=dict)
    """Until when each has another id in its place; a time in the past stays, so that none is listed again."""
    current: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """Those that have another id in their place now, with their types."""

    @property
    def again_at_s(self) -> float | None:
        """When time alone takes an id away; None: never."""
        return min((self.until_s[vgpu] for vgpu in self.current), default=None)


def replacements(
    inventory: Inventory,
    gpus: Collection[PciAddress],
    entries: Iterable[Entry],
    ends: PodEnds,
    before: Replacements,
    now_s: float,
) -> Replacements:
    """Return the vGPUs with another id in their place, of the GPUs in mode on-demand, by all allocations.

    The allocation ends before the vGPU is removed, so a vGPU without one is on its way out, too.
    """
    if not gpus:
        return Replacements()
    lives = {entry.target.vgpu for entry in entries if not _has_ended(entry, ends)}
    until_s: dict[VgpuId, float] = {}
    current: dict[VgpuId, VgpuType] = {}
    for vgpu, found in inventory.vgpus.items():
        if found.gpu not in gpus or vgpu in lives or isinstance(found.live.type, Unread):
            continue
        until_s[vgpu] = before.until_s.get(vgpu, now_s + REPLACED_S)
        if now_s < until_s[vgpu]:
            current[vgpu] = found.live.type
    return Replacements(until_s, current)


def _has_ended(entry: Entry, ends: PodEnds) -> bool:
    return entry.consumer is not None and entry.consumer.pod_uid in ends.ended

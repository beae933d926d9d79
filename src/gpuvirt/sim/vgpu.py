"""How many vGPUs of which type fit on a simulated GPU: the equal-size rule of NVIDIA's manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.ids import PciAddress, VgpuType


class VgpuTypeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One vGPU type of a board, as a machine file gives it."""

    id: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    """The number in the host's own id: `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    size: str
    """The framebuffer that it takes; types of one size may share a GPU."""
    most: Annotated[int, Meta(ge=1, le=256)]
    """How many fit on one GPU."""
    host_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,63}\Z")] | None = None
    """The host's own id of an mdev type where it is no `nvidia-<id>`: `i915-GVTg_V5_4`."""

    @property
    def folder(self) -> str:
        """The name of the type's folder below an mdev parent."""
        return self.host_id or f"nvidia-{self.id}"


@dataclass(slots=True, eq=False)
class Carving:
    """One GPU's vGPUs. A slot is the GPU itself, which carries many, or a VF, which carries one."""

    gpu: PciAddress
    types: tuple[VgpuTypeSpec, ...]
    slots: list[PciAddress]
    live: dict[str, tuple[VgpuTypeSpec, PciAddress]] = field(default_factory=dict)
    """By the vGPU's id, with the slot that carries it."""
    found: Mapping[tuple[PciAddress, VgpuType], int] = field(default_factory=dict)
    """How many of a type a slot could take by the word of a real host, when it carried `found_with`."""
    found_with: frozenset[str] = frozenset()

    def left(self, spec: VgpuTypeSpec, slot: PciAddress) -> int:
        """Return how many more of a type a slot can take."""
        if (slot, spec.name) in self.found and self.found_with == self.live.keys():
            return self.found[slot, spec.name]
        if any(taken.size != spec.size for taken, _ in self.live.values()):
            return 0
        left = spec.most - len(self.live)
        if slot == self.gpu:
            return max(left, 0)
        return 1 if left > 0 and slot not in {used for _, used in self.live.values()} else 0

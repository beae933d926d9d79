"""How many vGPUs of which type fit on a simulated GPU: the equal-size rule of NVIDIA's manager."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.ids import PciAddress, VgpuType


class VgpuTypeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One vGPU type of a board, as a machine file gives it."""

    id: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    """The number in the host's own id: `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    size: str
    """The framebuffer that it takes; types of one size may share a GPU."""
    most: Annotated[int, Meta(ge=1, le=256)]
    """How many fit on one GPU."""


@dataclass(slots=True, eq=False)
class Carving:
    """One GPU's vGPUs. A slot is the GPU itself, which carries many, or a VF, which carries one."""

    gpu: PciAddress
    types: tuple[VgpuTypeSpec, ...]
    slots: list[PciAddress]
    live: dict[str, tuple[VgpuTypeSpec, PciAddress]] = field(default_factory=dict)
    """By the vGPU's id, with the slot that carries it."""

    def left(self, spec: VgpuTypeSpec, slot: PciAddress) -> int:
        """Return how many more of a type a slot can take."""
        if any(taken.size != spec.size for taken, _ in self.live.values()):
            return 0
        left = spec.most - len(self.live)
        if slot == self.gpu:
            return max(left, 0)
        return 1 if left > 0 and slot not in {used for _, used in self.live.values()} else 0

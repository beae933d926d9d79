"""vGPUs as the host shows them: one report, whatever way the host has of making them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread


class Framework(StrEnum):
    """How a host carries its vGPUs."""

    MDEV = "mdev"
    """Mediated devices under `/sys/bus/mdev/devices`, on the GPU itself or on its VFs."""
    VENDOR_VFIO = "vendor-vfio"
    """VFs that stay on the vendor's driver and carry a type in `<vf>/nvidia/current_vgpu_type`."""


@dataclass(frozen=True, slots=True)
class LiveVgpu:
    """A vGPU that exists. Its type and group are `Unread` where they could not be told."""

    id: VgpuId
    type: VgpuType | Unread
    slot: PciAddress
    """The function that carries it: the GPU itself, or one of its VFs."""
    group: IommuGroup | Unread | None
    type_id: str | None = None
    """The host's own id of the type: `nvidia-592` (mdev), `1428` (vendor VFIO)."""


@dataclass(frozen=True, slots=True)
class VgpuHost:
    """What one GPU can carry and what it carries."""

    gpu: PciAddress
    framework: Framework
    slots: Mapping[PciAddress, Mapping[VgpuType, int]] = field(default_factory=dict)
    """How many of each type each slot could still take."""
    live: tuple[LiveVgpu, ...] = ()
    type_names: Mapping[str, VgpuType] = field(default_factory=dict)
    """What the host has called types, by its own ids of them: it names only those that could still be made."""
    unread: tuple[Unread, ...] = ()

"""vGPUs as the host shows them: one report, whatever way the host has of making them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import AMD, INTEL, PciFunction, Unread


class Framework(StrEnum):
    """How a host carries its vGPUs."""

    MDEV = "mdev"
    """Mediated devices under `/sys/bus/mdev/devices`, on the GPU itself or on its VFs."""
    VENDOR_VFIO = "vendor-vfio"
    """VFs that stay on the vendor's driver and carry a type in `<vf>/nvidia/current_vgpu_type`."""
    SRIOV_VF = "sriov-vf"
    """VFs that split the GPU evenly between them, as AMD's and Intel's do: all are made and taken away at once."""


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
    quarantined: Mapping[PciAddress, str] = field(default_factory=dict)
    """VFs that refused a type which they had offered, with what they said; none is to be made there."""

    def with_refusal(self, slot: PciAddress, said: str) -> Self:
        """Return the report with a VF in quarantine, until it carries a type again or its SR-IOV is switched off."""
        return replace(self, quarantined={**self.quarantined, slot: said}, slots={**self.slots, slot: {}})


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A part of a GPU in MIG mode."""

    id: int
    profile: str
    """`3g.40gb`"""
    profile_id: int
    start: int
    size: int
    """In memory slices, of which an A100 has eight."""


@dataclass(frozen=True, slots=True)
class SupportedType:
    """A vGPU type that a GPU knows, whether or not one could be made now, by NVIDIA's manager."""

    id: int
    """The number in `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    framebuffer_mib: int
    most: int
    """How many fit on the GPU, or on one of its GPU instances."""
    profile_id: int | None = None
    """The profile of the GPU instances that carry it; None for a time-sliced type."""


@dataclass(frozen=True, slots=True)
class GpuModes:
    """What only NVIDIA's own program says of a GPU, asked on demand and never in a scan.

    A mode is Unread where what the program said was not understood. None: it is none that this GPU has.
    """

    gpu: PciAddress
    mixed_sizes: bool | Unread | None = None
    """vGPUs of several sizes may be on it at once; lost with the driver, at a reset, and when VFs go on or off."""
    can_mix_sizes: bool | Unread | None = None
    mig: bool | Unread | None = None
    mig_pending: bool | Unread | None = None
    """What `mig` will be after a reset of the GPU, or a restart of the host."""
    gpu_instances: tuple[GpuInstance, ...] | Unread = ()


class SchedulerPolicy(StrEnum):
    """How time-sliced vGPUs share a GPU's time."""

    BEST_EFFORT = "best-effort"
    """Whoever has work gets the time that others leave."""
    EQUAL_SHARE = "equal-share"
    """Each that runs gets the same part."""
    FIXED_SHARE = "fixed-share"
    """Each gets the part that it would have on a full GPU."""


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A scheduling policy with its time slice; configs have it in this form."""

    policy: SchedulerPolicy
    timeslice_ms: int | None = None
    """1 to 30; best effort has none. None: the driver's own, 2 ms for types of which at most 8 fit on a GPU, else 1 ms.
    """

    @property
    def text(self) -> str:
        """The scheduler in words: `equal-share, 4 ms`."""
        return self.policy.value if self.timeslice_ms is None else f"{self.policy.value}, {self.timeslice_ms} ms"


@dataclass(frozen=True, slots=True)
class SmiReport:
    """What NVIDIA's own program said of a GPU when a plan needed to know."""

    modes: GpuModes
    types: Mapping[str, VgpuType] | Unread = field(default_factory=dict)
    """What the GPU's types are called, in any of its modes, by their numbers; none where that was not asked."""
    scheduler: Scheduler | Unread | None = None
    """None: it was not asked."""


def vf_type(count: int) -> VgpuType:
    """Return the name of the type that splits a GPU between `count` VFs; no vendor has one."""
    return VgpuType("1 VF" if count == 1 else f"{count} VFs")


def host_of_vfs(function: PciFunction) -> VgpuHost | None:
    """Return what a GPU of AMD or Intel carries by SR-IOV, and could; None where it has none, or is given away whole.

    A vGPU of this report is the GPU's whole set of VFs: its id and slot are the GPU's address, its type is their
    number. They go on together and off together (PCI Express 5.0, 9.3.3.3.1: VF Enable is one bit), and each VF is a
    function that is bound and offered as any other.
    """
    total = function.sriov_total_vfs or 0
    if function.id.vendor not in {AMD, INTEL} or not total or not isinstance(function.driver, str) or function.on_vfio:
        return None
    gpu, count = function.address, len(function.virtfns)
    return VgpuHost(
        gpu,
        Framework.SRIOV_VF,
        slots={gpu: {} if count else {vf_type(number): 1 for number in range(1, total + 1)}},
        live=(LiveVgpu(VgpuId(gpu), vf_type(count), gpu, function.iommu_group),) if count else (),
    )

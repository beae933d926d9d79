"""vGPUs as the host shows them, in the same form for each framework."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import AMD, INTEL, PciFunction, Unread


class Framework(StrEnum):
    """The kernel's interface for vGPUs."""

    MDEV = "mdev"
    """Mediated devices under `/sys/bus/mdev/devices`, on the GPU itself or on its VFs."""
    VENDOR_VFIO = "vendor-vfio"
    """VFs that stay on the vendor's driver and have a type in `<vf>/nvidia/current_vgpu_type`."""
    SRIOV_VF = "sriov-vf"
    """VFs that share the GPU evenly, as AMD's and Intel's do; all are created and removed at once."""


@dataclass(frozen=True, slots=True)
class UnnamedType(Unread):
    """A vGPU type whose id was read, but whose name no VF lists now."""

    id: str = ""
    answer: str = ""
    """nvidia-smi's answer, which does not name the type either; empty if nvidia-smi was not asked."""

    def after(self, answer: str) -> "UnnamedType":
        """Return the same type after this answer of nvidia-smi."""
        return UnnamedType(self.path, seen=self.seen, id=self.id, answer=answer)


class LiveVgpu(msgspec.Struct, frozen=True):
    """A vGPU that exists. Its type and group are `Unread` if they could not be read."""

    id: VgpuId
    type: VgpuType | Unread
    parent: PciAddress
    """The vGPU's parent: the GPU itself, or one of its VFs."""
    group: IommuGroup | Unread | None
    type_id: str | None = None
    """The host's id of the type: `nvidia-592` (mdev), `1428` (vendor VFIO)."""


class VgpuHost(msgspec.Struct, frozen=True):
    """The vGPUs that one GPU carries, and those that it can still carry."""

    gpu: PciAddress
    framework: Framework
    creatable: Mapping[PciAddress, Mapping[VgpuType, int]] = msgspec.field(default_factory=dict)
    """The number of vGPUs of each type that each parent can still carry."""
    live: tuple[LiveVgpu, ...] = ()
    type_names: Mapping[str, VgpuType] = msgspec.field(default_factory=dict)
    """The names of types, by the host's ids of them. The host names only types that can still be created."""
    unread: tuple[Unread, ...] = ()
    quarantined: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """VFs that rejected a type which they list as creatable, with their error. No vGPU is created on them."""
    type_ids: Mapping[VgpuType, str] = msgspec.field(default_factory=dict)
    """The host's ids of mediated devices' types: `nvidia-592`. They may change with the driver."""

    def with_refusal(self, parent: PciAddress, error: str) -> Self:
        """Return the report with a VF in quarantine, until the VF carries a type again or SR-IOV is switched off."""
        return replace(self, quarantined={**self.quarantined, parent: error}, creatable={**self.creatable, parent: {}})


class GpuInstance(msgspec.Struct, frozen=True):
    """A part of a GPU in MIG mode."""

    id: int
    profile: str
    """`3g.40gb`"""
    profile_id: int
    start: int
    size: int
    """The number of memory slices, of which an A100 has eight."""


class SupportedType(msgspec.Struct, frozen=True):
    """A vGPU type that a GPU supports by NVIDIA's vGPU manager, even if none can be created now."""

    id: int
    """The number in `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    framebuffer_mib: int
    most: int
    """The number of vGPUs that fit on the GPU, or on one of its GPU instances."""
    profile_id: int | None = None
    """The profile of the GPU instances that carry it; None for a time-sliced type."""


class GpuModes(msgspec.Struct, frozen=True):
    """The modes of a GPU, which only nvidia-smi reports. They are read on demand and never in a scan.

    A mode is Unread if its report was not understood, and None if the GPU does not have it.
    """

    gpu: PciAddress
    mixed_sizes: bool | Unread | None = None
    """Whether vGPUs of several sizes may share the GPU. A load of the driver, a reset, or a switch of VFs ends that."""
    can_mix_sizes: bool | Unread | None = None
    mig: bool | Unread | None = None
    mig_pending: bool | Unread | None = None
    """The value of `mig` after a reset of the GPU, or a reboot of the host."""
    gpu_instances: tuple[GpuInstance, ...] | Unread = ()


class SchedulerPolicy(StrEnum):
    """How time-sliced vGPUs share a GPU's time."""

    BEST_EFFORT = "best-effort"
    """A vGPU gets the time that the others do not use."""
    EQUAL_SHARE = "equal-share"
    """Each running vGPU gets the same share."""
    FIXED_SHARE = "fixed-share"
    """Each vGPU gets the share that it would have on a full GPU."""


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A scheduling policy with its time slice, in the form of vGPU configs."""

    policy: SchedulerPolicy
    timeslice_ms: int | None = None
    """1 to 30; None for best effort and for the driver's default: 2 ms for types of which at most 8 fit, else 1 ms."""

    @property
    def text(self) -> str:
        """The scheduler as text: `equal-share, 4 ms`."""
        return self.policy.value if self.timeslice_ms is None else f"{self.policy.value}, {self.timeslice_ms} ms"


class SmiReport(msgspec.Struct, frozen=True):
    """The report of nvidia-smi on a GPU, read when a plan needs it."""

    modes: GpuModes
    types: Mapping[str, VgpuType] | Unread = msgspec.field(default_factory=dict)
    """The names of the GPU's types in all of its modes, by their numbers; empty if they were not read."""
    scheduler: Scheduler | Unread | None = None
    """None if it was not read."""


def vf_type(count: int) -> VgpuType:
    """Return gpuvirt's name of the type that shares a GPU between `count` VFs; no vendor has a name for it."""
    return VgpuType("1 VF" if count == 1 else f"{count} VFs")


def is_vf_type(name: str) -> bool:
    """Return whether a name is that of a set of VFs, which is a type of its own and has no name in configs."""
    number, _, rest = name.partition(" ")
    return number.isdecimal() and name == vf_type(int(number)) and bool(rest)


def host_of_vfs(function: PciFunction) -> VgpuHost | None:
    """Return the VFs of a GPU of AMD or Intel as vGPUs; None if it has no SR-IOV, or is bound to a VFIO driver.

    A vGPU of this report is the GPU's whole set of VFs: its id and parent are the GPU's address, its type is the number
    of VFs. VFs are switched on and off together (PCI Express 5.0, 9.3.3.3.1: VF Enable is one bit), and each VF is a
    function that is bound and offered as any other.
    """
    total = function.sriov_total_vfs or 0
    if function.id.vendor not in {AMD, INTEL} or not total or not isinstance(function.driver, str) or function.on_vfio:
        return None
    gpu, count = function.address, len(function.virtfns)
    return VgpuHost(
        gpu,
        Framework.SRIOV_VF,
        creatable={gpu: {} if count else {vf_type(number): 1 for number in range(1, total + 1)}},
        live=(LiveVgpu(VgpuId(gpu), vf_type(count), gpu, function.iommu_group),) if count else (),
    )

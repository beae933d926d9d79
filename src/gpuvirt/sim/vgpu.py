"""How many vGPUs of which type fit on a simulated GPU: the rules of NVIDIA's manager in each of a GPU's modes.

Equal-size mode: all vGPUs on a GPU are of one size. Mixed-size mode: each has a place in the framebuffer, of those that
NVIDIA lists for its size. MIG mode: each has a GPU instance of its type's profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.vgpu import GpuInstance, Scheduler, SchedulerPolicy

Gigabytes = Annotated[int, Meta(ge=0, le=1024)]
Slices = Annotated[int, Meta(ge=0, le=16)]
DEFAULT_SCHEDULER = Scheduler(SchedulerPolicy.BEST_EFFORT)


class VgpuTypeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One vGPU type of a board, as a host file gives it."""

    id: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    """The number in the host's own id: `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    size: str
    """The framebuffer that it takes; types of one size may share a GPU."""
    most: Annotated[int, Meta(ge=1, le=256)]
    """How many fit on one GPU."""
    host_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,63}\Z")] | None = None
    """The host's own id of an mdev type where it is no `nvidia-<id>`: `i915-GVTg_V5_4`."""
    places: tuple[Gigabytes, ...] = ()
    """Where in the framebuffer it may lie in mixed-size mode, in GB (placement ids); its size is then in GB: `4G`."""
    profile: str | None = None
    """The profile of the GPU instance that it needs: `1g.10gb`; such a type is offered in MIG mode alone."""

    @property
    def folder(self) -> str:
        """The name of the type's folder below an mdev parent."""
        return self.host_id or f"nvidia-{self.id}"

    @property
    def gigabytes(self) -> int:
        """The framebuffer that it takes, of a size like `4G`; 0 for others."""
        number = self.size.removesuffix("G")
        return int(number) if self.size.endswith("G") and number.isdigit() else 0


class MigProfileSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A kind of GPU instance that a board can have."""

    id: Annotated[int, Meta(ge=0, le=255)]
    name: str
    """`1g.10gb`"""
    size: Slices
    """The memory slices that it takes."""
    starts: tuple[Slices, ...]
    """Where it may begin, in the order in which the driver tries."""


@dataclass(slots=True, eq=False)
class SimVgpuHost:
    """One GPU's vGPUs. A slot is the GPU itself, which carries many, or a VF, which carries one."""

    gpu: PciAddress
    all_types: tuple[VgpuTypeSpec, ...]
    slots: list[PciAddress]
    profiles: tuple[MigProfileSpec, ...] = ()
    live: dict[str, tuple[VgpuTypeSpec, PciAddress]] = field(default_factory=dict)
    """By the vGPU's id, with the slot that carries it."""
    found: Mapping[tuple[PciAddress, VgpuType], int] = field(default_factory=dict)
    """How many of a type a slot could take by the word of a real host, when it carried `found_with`."""
    found_with: frozenset[str] = frozenset()
    mixed_sizes: bool = False
    mig: bool = False
    mig_pending: bool = False
    instances: list[GpuInstance] = field(default_factory=list)
    computing: set[int] = field(default_factory=set)
    """The GPU instances, by their ids, that have a compute instance."""
    scheduler: Scheduler = field(default_factory=lambda: DEFAULT_SCHEDULER)
    places: dict[str, int] = field(default_factory=dict)
    """Where each vGPU lies in mixed-size mode, by its id."""
    on_instance: dict[str, int] = field(default_factory=dict)
    """On which GPU instance each vGPU is in MIG mode, by its id."""

    @property
    def types(self) -> tuple[VgpuTypeSpec, ...]:
        """The types that the GPU offers in its mode."""
        return tuple(spec for spec in self.all_types if self._is_of_mode(spec))

    @property
    def can_mix_sizes(self) -> bool:
        """Whether it knows places for its types."""
        return any(spec.places for spec in self.all_types)

    def take(self, vgpu: str, spec: VgpuTypeSpec, slot: PciAddress) -> None:
        """Have a vGPU, whether or not it fits."""
        self.live[vgpu] = spec, slot
        if self.mixed_sizes and (free := self._free_places(spec)):
            self.places[vgpu] = free[0]
        if self.mig and (instances := self._free_instances(spec)):
            self.on_instance[vgpu] = instances[0].id

    def free(self, vgpu: str) -> None:
        """Have a vGPU no more; none of that id is fine."""
        self.live.pop(vgpu, None)
        self.places.pop(vgpu, None)
        self.on_instance.pop(vgpu, None)

    def left(self, spec: VgpuTypeSpec, slot: PciAddress) -> int:
        """Return how many more of a type a slot can take."""
        if (slot, spec.name) in self.found and self.found_with == self.live.keys():
            return self.found[slot, spec.name]
        left = max(self._room(spec), 0)
        if slot == self.gpu:
            return left
        return 1 if left and slot not in {used for _, used in self.live.values()} else 0

    def forget(self) -> None:
        """The driver has the GPU again: what it was told before is gone, but for MIG mode, which the board keeps."""
        if not self.live:
            self.mixed_sizes, self.mig = False, self.mig_pending
            self.instances.clear()
            self.computing.clear()
            self.scheduler = DEFAULT_SCHEDULER

    def add_instance(self, profile: MigProfileSpec, at: int | None = None) -> GpuInstance | None:
        """Make a GPU instance where its profile finds room first, or `at` a slice; None where there is none."""
        taken = {number for one in self.instances for number in range(one.start, one.start + one.size)}
        for start in profile.starts if at is None else {at} & {*profile.starts}:
            if taken.isdisjoint(range(start, start + profile.size)):
                used = {one.id for one in self.instances}
                number = next(number for number in range(1, len(used) + 2) if number not in used)
                self.instances.append(GpuInstance(number, profile.name, profile.id, start, profile.size))
                return self.instances[-1]
        return None

    def _is_of_mode(self, spec: VgpuTypeSpec) -> bool:
        return not self.profiles or (spec.profile is not None) == self.mig

    def _room(self, spec: VgpuTypeSpec) -> int:
        if not self._is_of_mode(spec):
            return 0
        if self.mig and self.profiles:
            return len(self._free_instances(spec))
        if self.mixed_sizes:
            return len(self._free_places(spec))
        if any(taken.size != spec.size for taken, _ in self.live.values()):
            return 0
        return spec.most - len(self.live)

    def _free_instances(self, spec: VgpuTypeSpec) -> list[GpuInstance]:
        used = set(self.on_instance.values())
        return [one for one in self.instances if one.profile == spec.profile and one.id not in used]

    def _free_places(self, spec: VgpuTypeSpec) -> list[int]:
        taken = {
            number
            for vgpu, place in self.places.items()
            for number in range(place, place + self.live[vgpu][0].gigabytes)
        }
        return [place for place in spec.places if taken.isdisjoint(range(place, place + spec.gigabytes))]

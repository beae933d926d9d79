"""How many vGPUs of which type fit on a simulated GPU: the rules of NVIDIA's manager in each of the GPU's modes.

Equal-size mode: all vGPUs of a GPU have the same size. Mixed-size mode: each vGPU has one of the placements in the
framebuffer that NVIDIA lists for its size. MIG mode: each vGPU has a GPU instance of its type's profile.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.vgpu import GpuInstance, Scheduler, SchedulerPolicy

Gigabytes = Annotated[int, Meta(ge=0, le=1024)]
Slices = Annotated[int, Meta(ge=0, le=16)]
DEFAULT_SCHEDULER = Scheduler(SchedulerPolicy.BEST_EFFORT)


class VgpuTypeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One vGPU type of a board, in a host file."""

    id: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    """The number in the host's id: `nvidia-592`, or a vendor-VFIO type id."""
    name: VgpuType
    size: str
    """The framebuffer of a vGPU; types of one size can share a GPU."""
    most: Annotated[int, Meta(ge=1, le=256)]
    """The number of vGPUs that fit on one GPU."""
    host_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,63}\Z")] | None = None
    """The host's id of an mdev type where that is not `nvidia-<id>`: `i915-GVTg_V5_4`."""
    places: tuple[Gigabytes, ...] = ()
    """The placement ids in mixed-size mode: places in the framebuffer, in GB. The size is then in GB, too: `4G`."""
    profile: str | None = None
    """The profile of the GPU instance that the type needs: `1g.10gb`; such a type is offered only in MIG mode."""
    per_instance: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of vGPUs of the type that share one GPU instance in time."""

    @property
    def folder(self) -> str:
        """The name of the type's folder below an mdev parent."""
        return self.host_id or f"nvidia-{self.id}"

    @property
    def gigabytes(self) -> int:
        """The framebuffer of a size like `4G`; 0 for other sizes."""
        number = self.size.removesuffix("G")
        return int(number) if self.size.endswith("G") and number.isdigit() else 0


class MigProfileSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A kind of GPU instance of a board."""

    id: Annotated[int, Meta(ge=0, le=255)]
    name: str
    """`1g.10gb`"""
    size: Slices
    """The number of memory slices."""
    starts: tuple[Slices, ...]
    """The slices where a GPU instance can begin, in the order in which the driver tries them."""


class SimVgpuHost(msgspec.Struct, eq=False):
    """One GPU's vGPUs. A slot is the GPU itself, which carries many, or a VF, which carries one."""

    gpu: PciAddress
    all_types: tuple[VgpuTypeSpec, ...]
    slots: list[PciAddress]
    profiles: tuple[MigProfileSpec, ...] = ()
    live: dict[str, tuple[VgpuTypeSpec, PciAddress]] = msgspec.field(default_factory=dict)
    """The vGPUs by their ids, with the slot that carries each."""
    found: Mapping[tuple[PciAddress, VgpuType], int] = msgspec.field(default_factory=dict)
    """How many vGPUs of a type a slot could still take, as an imported host reported while it carried `found_with`."""
    found_with: frozenset[str] = frozenset()
    mixed_sizes: bool = False
    mig: bool = False
    mig_pending: bool = False
    instances: list[GpuInstance] = msgspec.field(default_factory=list)
    computing: set[int] = msgspec.field(default_factory=set)
    """The ids of the GPU instances that have a compute instance."""
    scheduler: Scheduler = msgspec.field(default_factory=lambda: DEFAULT_SCHEDULER)
    places: dict[str, int] = msgspec.field(default_factory=dict)
    """The placement of each vGPU in mixed-size mode, by its id."""
    on_instance: dict[str, int] = msgspec.field(default_factory=dict)
    """The GPU instance of each vGPU in MIG mode, by its id."""

    @property
    def types(self) -> tuple[VgpuTypeSpec, ...]:
        """The types that the GPU offers in its current mode."""
        return tuple(spec for spec in self.all_types if self._is_of_mode(spec))

    @property
    def can_mix_sizes(self) -> bool:
        """Whether the GPU's types have placements."""
        return any(spec.places for spec in self.all_types)

    def take(self, vgpu: str, spec: VgpuTypeSpec, slot: PciAddress) -> None:
        """Add a vGPU, whether or not it fits."""
        self.live[vgpu] = spec, slot
        if self.mixed_sizes and (free := self._free_places(spec)):
            self.places[vgpu] = free[0]
        if self.mig and (instances := self._free_instances(spec)):
            self.on_instance[vgpu] = next(iter(instances)).id

    def free(self, vgpu: str) -> None:
        """Remove a vGPU; do nothing where it does not exist."""
        self.live.pop(vgpu, None)
        self.places.pop(vgpu, None)
        self.on_instance.pop(vgpu, None)

    def left(self, spec: VgpuTypeSpec, slot: PciAddress) -> int:
        """Return how many more vGPUs of a type a slot can take."""
        if (slot, spec.name) in self.found and self.found_with == self.live.keys():
            return self.found[slot, spec.name]
        left = max(self._room(spec), 0)
        if slot == self.gpu:
            return left
        return 1 if left and slot not in {used for _, used in self.live.values()} else 0

    def forget(self) -> None:
        """Reset the modes, as when the driver is bound again, except for MIG mode, which the board keeps."""
        if not self.live:
            self.mixed_sizes, self.mig = False, self.mig_pending
            self.instances.clear()
            self.computing.clear()
            self.scheduler = DEFAULT_SCHEDULER

    def add_instance(self, profile: MigProfileSpec, at: int | None = None) -> GpuInstance | None:
        """Create a GPU instance in the first free place of its profile, or `at` a slice; None without room."""
        taken = {number for used in self.instances for number in range(used.start, used.start + used.size)}
        for start in profile.starts if at is None else {at} & {*profile.starts}:
            if taken.isdisjoint(range(start, start + profile.size)):
                used = {instance.id for instance in self.instances}
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
            return sum(self._free_instances(spec).values())
        if self.mixed_sizes:
            return len(self._free_places(spec))
        if any(taken.size != spec.size for taken, _ in self.live.values()):
            return 0
        return spec.most - len(self.live)

    def _free_instances(self, spec: VgpuTypeSpec) -> Mapping[GpuInstance, int]:
        """Return the instances that can take vGPUs of a type, each with their number: types share no instance."""
        found: dict[GpuInstance, int] = {}
        for instance in (instance for instance in self.instances if instance.profile == spec.profile):
            carried = [self.live[vgpu][0] for vgpu, number in self.on_instance.items() if number == instance.id]
            if len(carried) < spec.per_instance and all(other == spec for other in carried):
                found[instance] = spec.per_instance - len(carried)
        return found

    def _free_places(self, spec: VgpuTypeSpec) -> list[int]:
        taken = {
            number
            for vgpu, place in self.places.items()
            for number in range(place, place + self.live[vgpu][0].gigabytes)
        }
        return [place for place in spec.places if taken.isdisjoint(range(place, place + spec.gigabytes))]

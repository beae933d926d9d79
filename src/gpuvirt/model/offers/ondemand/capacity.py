"""How many more vGPUs of each type a GPU can carry, for the lists of the kubelet and for Allocate."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.model.change.vgpus import instances, modes
from gpuvirt.model.change.vgpus.gpustate import GpuState, is_mig, size_of


class Carried(msgspec.Struct, frozen=True):
    """The vGPUs that take a GPU's room: those that exist, are being removed, or are being created."""

    types: Counter[VgpuType]
    intended: int = 0
    """How many of them the host does not show yet."""

    @property
    def is_idle(self) -> bool:
        """Whether the GPU carries nothing, so that any type may come."""
        return not self.types


def carried_by(gpu_state: GpuState, intended: Iterable[VgpuType] = ()) -> Carried | Unread:
    """Return what takes a GPU's room, Unread if a type can't be read.

    `intended` are the vGPUs that Allocate is creating and the host does not show yet. A vGPU that is being removed
    takes its place until the host lacks it.
    """
    host, types = gpu_state.host, Counter[VgpuType]()
    for unread in host.unread:
        return unread
    for vgpu in host.live:
        if isinstance(vgpu.type, Unread):
            return vgpu.type
        types[vgpu.type] += 1
    types.update(gpu_state.leaving.values())
    coming = list(intended)
    types.update(coming)
    return Carried(types, len(coming))


def room(gpu_state: GpuState, carried: Carried) -> Mapping[VgpuType, int]:
    """Return how many more vGPUs of each type fit on a GPU, by its driver, the catalog, and `carried`.

    The driver's own numbers win where they are smaller. They may be older than `carried`, but for MIG-backed types, of
    which the driver says only whether a GPU instance is free.
    """
    free = _creatable(gpu_state, carried)
    return {vgpu_type: _most(gpu_state, carried, vgpu_type, number) for vgpu_type, number in sorted(free.items())}


def _creatable(gpu_state: GpuState, carried: Carried) -> Counter[VgpuType]:
    """Return how many vGPUs of each type the driver would create, less those that it has not counted yet."""
    host, found = gpu_state.host, Counter[VgpuType]()
    in_mig_mode = gpu_state.has_mig_vgpus
    used = {vgpu.parent for vgpu in host.live} | host.quarantined.keys()
    for parent, types in host.creatable.items():
        for vgpu_type, number in types.items():
            if is_mig(vgpu_type) is not in_mig_mode:  # a type of another mode of the GPU
                continue
            if parent == host.gpu:
                found[vgpu_type] += number
            elif parent not in used:
                found[vgpu_type] += min(number, 1)
    return Counter({vgpu_type: max(number - carried.intended, 0) for vgpu_type, number in found.items()})


def _most(gpu_state: GpuState, carried: Carried, vgpu_type: VgpuType, free: int) -> int:
    if is_mig(vgpu_type):
        return _on_instances(gpu_state, carried, vgpu_type, free)
    if gpu_state.mixed_sizes and gpu_state.card is not None:
        return sum(
            modes.fits(gpu_state.card, carried.types + Counter({vgpu_type: number})) for number in range(1, free + 1)
        )
    if not gpu_state.mixed_sizes and any(size_of(other) != size_of(vgpu_type) for other in carried.types):
        return 0
    most = gpu_state.most.get(vgpu_type)
    return free if most is None else max(min(free, most - carried.types.total()), 0)


def _on_instances(gpu_state: GpuState, carried: Carried, vgpu_type: VgpuType, free: int) -> int:
    """Return how many more vGPUs of a MIG-backed type find a GPU instance.

    The driver lists a type if it has a free instance, but not how many. nvidia-smi's report has the number; without it,
    or if instances were created since, one vGPU fits for certain.
    """
    listed = 1 if carried.intended == 0 else 0
    certain = instances.certain_room(gpu_state, vgpu_type, carried.types)
    return min(free, max(certain if certain is not None else 0, listed))

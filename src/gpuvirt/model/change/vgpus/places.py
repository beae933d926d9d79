"""The parents and ids of new vGPUs of a GPU.

The id of a new mediated device follows from the host, the parent, the type and a number, so the same desired state
leads to the same ids.
"""

import uuid
from collections.abc import Iterator, Mapping
from itertools import count

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus.gpustate import GpuState


class VgpuPlaces:
    """The free parents of one GPU, and the ids of its new vGPUs."""

    def __init__(self, gpu_state: GpuState, removed: Mapping[VgpuId, VgpuType]) -> None:
        """Take the state of a GPU, and the vGPUs that are removed first; new vGPUs of their types get their ids."""
        staying = [vgpu for vgpu in gpu_state.host.live if vgpu.id not in removed]
        self._gpu_state = gpu_state
        self._taken = {vgpu.id for vgpu in staying} | gpu_state.leaving.keys()
        self._on_gpu = gpu_state.host.gpu in gpu_state.host.creatable
        used = {vgpu.parent for vgpu in staying}
        closed = used | gpu_state.host.quarantined.keys()
        self._free = [gpu_state.host.gpu] if self._on_gpu else sorted(gpu_state.host.creatable.keys() - closed)
        self._parents: dict[VgpuType, Mapping[VgpuId, PciAddress]] = {}
        # vGPUs that pods had come before those that are only removed for a moment.
        before = {**gpu_state.remembered, **removed}
        self._remembered = {id_: type_ for id_, type_ in before.items() if id_ not in self._taken}

    def creates(self, vgpu_type: VgpuType, number: int) -> Iterator[CreateVgpu]:
        """Yield the steps that create vGPUs of a type, as far as there are parents; ids that pods had come first."""
        former_ids = [vgpu for vgpu, had in self._remembered.items() if had == vgpu_type][: max(number, 0)]
        missing = number
        for vgpu in former_ids:
            if (parent := self._parent_of(vgpu, vgpu_type)) is not None:
                missing -= 1
                yield self._take(vgpu, vgpu_type, parent)
        for _ in range(missing):
            if not self._free:
                return
            parent = self._free[0]
            yield self._take(self._new_id(parent, vgpu_type), vgpu_type, parent)

    def create_again(self, vgpu: VgpuId, vgpu_type: VgpuType) -> CreateVgpu | None:
        """Return the step that creates a vGPU with a former id, which takes its parent; None if there is none."""
        parent = self._parent_of(vgpu, vgpu_type)
        return self._take(vgpu, vgpu_type, parent) if parent is not None else None

    def _take(self, vgpu: VgpuId, vgpu_type: VgpuType, parent: PciAddress) -> CreateVgpu:
        self._taken.add(vgpu)
        self._remembered.pop(vgpu, None)
        if not self._on_gpu:
            self._free.remove(parent)
        return CreateVgpu(vgpu, vgpu_type, parent)

    def _parent_of(self, vgpu: VgpuId, vgpu_type: VgpuType) -> PciAddress | None:
        """Return the free parent of an id: the one that it names or follows from, else the first.

        None if there is no such parent, as with an id that is the address of another VF.
        """
        if self._gpu_state.host.framework is not Framework.MDEV:
            return next((parent for parent in self._free if vgpu == VgpuId(parent)), None)
        if vgpu_type not in self._parents:
            self._parents[vgpu_type] = {id_: parent for parent in self._free for id_ in self._ids(parent, vgpu_type)}
        parent = self._parents[vgpu_type].get(vgpu)
        return parent if parent in self._free else next(iter(self._free), None)

    def _ids(self, parent: PciAddress, vgpu_type: VgpuType) -> list[VgpuId]:
        return [self._id(parent, vgpu_type, number) for number in range(len(self._gpu_state.host.creatable) + 1)]

    def _new_id(self, parent: PciAddress, vgpu_type: VgpuType) -> VgpuId:
        if self._gpu_state.host.framework is not Framework.MDEV:
            return VgpuId(parent)
        unavailable = {*self._taken, *self._remembered}
        return next(id_ for number in count() if (id_ := self._id(parent, vgpu_type, number)) not in unavailable)

    def _id(self, parent: PciAddress, vgpu_type: VgpuType, number: int) -> VgpuId:
        return VgpuId(str(uuid.uuid5(self._gpu_state.namespace, f"{parent} {vgpu_type} {number}")))

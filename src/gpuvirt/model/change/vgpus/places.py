"""Where new vGPUs of a GPU go, and what they are called.

Ids of new mediated devices follow from host, slot, type and a number, so the same desired state makes the same ids.
"""

import uuid
from collections.abc import Iterator, Mapping
from itertools import count

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus.gpustate import GpuState


class VgpuPlaces:
    """Where new vGPUs of one GPU go, and what they are called."""

    def __init__(self, gpu_state: GpuState, removed: Mapping[VgpuId, VgpuType]) -> None:
        """`removed` go before any is made; where some of such a type are made after all, the first have their ids."""
        staying = [one for one in gpu_state.host.live if one.id not in removed]
        self._gpu_state = gpu_state
        self._taken = {one.id for one in staying} | gpu_state.leaving.keys()
        self._on_gpu = gpu_state.host.gpu in gpu_state.host.slots
        used = {one.slot for one in staying}
        closed = used | gpu_state.host.quarantined.keys()
        self._free = [gpu_state.host.gpu] if self._on_gpu else sorted(gpu_state.host.slots.keys() - closed)
        self._homes: dict[VgpuType, Mapping[VgpuId, PciAddress]] = {}
        # What pods had comes before what merely went for a moment.
        before = {**dict(sorted(gpu_state.remembered.items())), **removed}
        self._remembered = {id_: type_ for id_, type_ in before.items() if id_ not in self._taken}

    def creates(self, vgpu_type: VgpuType, number: int) -> Iterator[CreateVgpu]:
        """Yield the steps that make so many of a type, as far as there are places; what pods had before comes first."""
        desired_ids = [one for one, had in self._remembered.items() if had == vgpu_type][: max(number, 0)]
        missing = number
        for vgpu in desired_ids:
            if (slot := self._slot_of(vgpu, vgpu_type)) is not None:
                missing -= 1
                yield self._take(vgpu, vgpu_type, slot)
        for _ in range(missing):
            if not self._free:
                return
            slot = self._free[0]
            yield self._take(self._new_id(slot, vgpu_type), vgpu_type, slot)

    def _take(self, vgpu: VgpuId, vgpu_type: VgpuType, slot: PciAddress) -> CreateVgpu:
        self._taken.add(vgpu)
        self._remembered.pop(vgpu, None)
        if not self._on_gpu:
            self._free.remove(slot)
        return CreateVgpu(vgpu, vgpu_type, slot)

    def _slot_of(self, vgpu: VgpuId, vgpu_type: VgpuType) -> PciAddress | None:
        """Return where an id belongs: the slot that it names or follows from, else the first that is free.

        None where there is no such slot, as with an id that is the address of another.
        """
        if self._gpu_state.host.framework is not Framework.MDEV:
            return next((slot for slot in self._free if vgpu == VgpuId(slot)), None)
        if vgpu_type not in self._homes:
            self._homes[vgpu_type] = {one: slot for slot in self._free for one in self._ids(slot, vgpu_type)}
        home = self._homes[vgpu_type].get(vgpu)
        return home if home in self._free else next(iter(self._free), None)

    def _ids(self, slot: PciAddress, vgpu_type: VgpuType) -> list[VgpuId]:
        return [self._id(slot, vgpu_type, number) for number in range(len(self._gpu_state.host.slots) + 1)]

    def _new_id(self, slot: PciAddress, vgpu_type: VgpuType) -> VgpuId:
        if self._gpu_state.host.framework is not Framework.MDEV:
            return VgpuId(slot)
        later = {*self._taken, *self._remembered}
        return next(one for number in count() if (one := self._id(slot, vgpu_type, number)) not in later)

    def _id(self, slot: PciAddress, vgpu_type: VgpuType, number: int) -> VgpuId:
        return VgpuId(str(uuid.uuid5(self._gpu_state.namespace, f"{slot} {vgpu_type} {number}")))

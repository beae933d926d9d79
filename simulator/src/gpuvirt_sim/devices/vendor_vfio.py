"""Simulated VFs that carry a vGPU type while they stay on the driver `nvidia` (vendor VFIO).

The files and their formats are those that users and KubeVirt describe; they were not compared with hardware.
"""

import errno
from collections.abc import Callable, Mapping

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.vfio import Vfio
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from gpuvirt_sim.files.blocking import Blocking
from gpuvirt_sim.files.durations import Operation
from gpuvirt_sim.files.tree import File, Tree, fails

NO_TYPE = 0


class VendorVfioBus:
    """All VFs of a simulated host that can carry a vGPU type."""

    def __init__(self, tree: Tree, vfio: Vfio, blocking: Blocking, changed: Callable[[], None]) -> None:
        self.refusing: set[PciAddress] = set()
        """VFs that list types and reject each, as a real VF did after its VM was killed at an unfortunate moment."""
        self._tree = tree
        self._vfio = vfio
        self._blocking = blocking
        self._changed = changed

    def offer(
        self, vgpu_host: SimVgpuHost, folders: Mapping[PciAddress, HostPath], groups: Mapping[PciAddress, IommuGroup]
    ) -> None:
        """Let the VFs of a GPU carry vGPU types; `folders` and `groups` are the VFs' sysfs folders and IOMMU groups."""
        for slot in vgpu_host.slots:
            self.offer_slot(vgpu_host, slot, folders[slot], groups[slot])

    def add(
        self, vgpu_host: SimVgpuHost, slot: PciAddress, spec: VgpuTypeSpec, folder: HostPath, group: IommuGroup
    ) -> None:
        """Give a VF a vGPU type, whether or not it fits."""
        vgpu_host.take(slot, spec, slot)
        self._vfio.add_vfio_device(group, slot, folder)

    def remove_vf(self, vgpu_host: SimVgpuHost, slot: PciAddress, folder: HostPath, group: IommuGroup) -> None:
        """Remove a VF with its type; a later VF at its address accepts types again."""
        if slot in vgpu_host.live:
            vgpu_host.free(slot)
            self._vfio.remove_vfio_device(group, slot, folder)
        self.refusing.discard(slot)

    def offer_slot(self, vgpu_host: SimVgpuHost, slot: PciAddress, folder: HostPath, group: IommuGroup) -> None:
        """Let one VF carry a vGPU type."""
        self._tree.place(
            HostPath(f"{folder}/nvidia/creatable_vgpu_types"), File(read=lambda: _creatable(vgpu_host, slot))
        )
        current = File(
            read=lambda: f"{_current(vgpu_host, slot)}\n",
            write=lambda text: self._set_type(vgpu_host, slot, folder, group, text),
        )
        self._tree.place(HostPath(f"{folder}/nvidia/current_vgpu_type"), current)

    def _set_type(
        self, vgpu_host: SimVgpuHost, slot: PciAddress, folder: HostPath, group: IommuGroup, text: str
    ) -> None:
        self._blocking.spend(Operation.CURRENT_VGPU_TYPE)
        try:
            desired = int(text)
        except ValueError as error:
            raise fails(errno.EINVAL, slot) from error
        if self._vfio.in_use(group, slot):
            raise fails(errno.EBUSY, slot)
        if desired == NO_TYPE:
            if slot in vgpu_host.live:
                vgpu_host.free(slot)
                self._vfio.remove_vfio_device(group, slot, folder)
        else:
            spec = next((spec for spec in vgpu_host.types if spec.id == desired), None)
            if spec is None or slot in vgpu_host.live:
                raise fails(errno.EINVAL, slot)
            if vgpu_host.left(spec, slot) < 1:
                raise fails(errno.EPERM, slot)
            if slot in self.refusing:
                raise fails(errno.EIO, slot)
            self.add(vgpu_host, slot, spec, folder, group)
        self._changed()


def _creatable(vgpu_host: SimVgpuHost, slot: PciAddress) -> str:
    rows = [f"{spec.id:<6}: {spec.name}" for spec in vgpu_host.types if vgpu_host.left(spec, slot) > 0]
    return "\n".join(["ID    : vGPU Name", *rows, ""])


def _current(vgpu_host: SimVgpuHost, slot: PciAddress) -> int:
    spec_and_slot = vgpu_host.live.get(slot)
    return spec_and_slot[0].id if spec_and_slot else NO_TYPE

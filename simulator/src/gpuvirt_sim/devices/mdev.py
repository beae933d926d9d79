"""Simulated mediated devices: their types, `create`, and `remove`, which hides a device in use before it frees it."""

import errno
import re
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.vfio import Vfio
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from gpuvirt_sim.files import written
from gpuvirt_sim.files.blocking import Blocking
from gpuvirt_sim.files.durations import Operation
from gpuvirt_sim.files.tree import File, Tree, constant, fails

LIVE = "/sys/bus/mdev/devices"
PARENTS = "/sys/class/mdev_bus"
DRIVER = "/sys/bus/mdev/drivers/nvidia-vgpu-vfio"
FIRST_GROUP = 200
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}.?", re.DOTALL)
"""One more character of any kind is accepted (kernel 6.1 compares the length with 36 and 37)."""


class SimMdev(msgspec.Struct, frozen=True):
    """One mediated device."""

    uuid: str
    spec: VgpuTypeSpec
    vgpu_host: SimVgpuHost
    slot: PciAddress
    folder: HostPath
    group: IommuGroup


class MdevBus:
    """All mediated devices of a simulated host."""

    def __init__(self, tree: Tree, vfio: Vfio, blocking: Blocking, changed: Callable[[], None]) -> None:
        self.devices: dict[str, SimMdev] = {}
        self._parents: dict[PciAddress, tuple[SimVgpuHost, HostPath]] = {}
        self._tree = tree
        self._vfio = vfio
        self._blocking = blocking
        self._changed = changed
        self._next_group = FIRST_GROUP

    def offer(self, vgpu_host: SimVgpuHost, folders: Mapping[PciAddress, HostPath]) -> None:
        """Let a GPU's parents create mediated devices while the driver has them; `folders` are those in sysfs."""
        self._tree.make(HostPath(LIVE))
        self._parents |= {slot: (vgpu_host, folders[slot]) for slot in vgpu_host.slots}

    def withdraw(self, slot: PciAddress) -> None:
        """Stop a parent, which carries no device, from creating mediated devices."""
        self._parents.pop(slot, None)

    def refresh(self, vgpu_host: SimVgpuHost) -> None:
        """Show the types of a GPU's new mode; the GPU must carry no vGPU."""
        for slot in vgpu_host.slots:
            if slot in self._parents and self._tree.exists(HostPath(f"{PARENTS}/{slot}")):
                self._tree.remove(HostPath(f"{self._parents[slot][1]}/mdev_supported_types"))
                self.on_bind(slot)

    def on_bind(self, slot: PciAddress) -> None:
        """Show the types of a parent, to which its native driver was bound."""
        if slot not in self._parents:
            return
        vgpu_host, folder = self._parents[slot]
        self._tree.link(HostPath(f"{PARENTS}/{slot}"), folder)
        for spec in vgpu_host.types:
            self._place_type(vgpu_host, slot, folder, spec)

    def on_unbind(self, slot: PciAddress, finish: Callable[[], None]) -> None:
        """Remove all devices of a parent whose driver is being unbound; call `finish` when none is in use any more."""
        if slot not in self._parents:
            finish()
            return
        self._tree.remove(HostPath(f"{PARENTS}/{slot}"))
        in_use: set[str] = set()

        def end_when_empty() -> None:
            if not in_use:
                self._tree.remove(HostPath(f"{self._parents[slot][1]}/mdev_supported_types"))
                finish()

        def free(device: SimMdev) -> None:
            self._finish(device)
            in_use.discard(device.uuid)
            end_when_empty()

        for device in [device for device in self.devices.values() if device.slot == slot]:
            self._tree.remove(HostPath(f"{LIVE}/{device.uuid}"))
            if self._vfio.in_use(device.group, device.uuid):
                in_use.add(device.uuid)
                self._vfio.request_release(device.group, device.uuid, partial(free, device))
            else:
                self._finish(device)
        end_when_empty()

    def on_unplug(self, slot: PciAddress) -> None:
        """Remove the devices of an unplugged parent, in use or not."""
        for device in [device for device in self.devices.values() if device.slot == slot]:
            self._tree.remove(HostPath(f"{LIVE}/{device.uuid}"))
            self._finish(device)
        self._tree.remove(HostPath(f"{PARENTS}/{slot}"))

    def create(self, vgpu_host: SimVgpuHost, slot: PciAddress, spec: VgpuTypeSpec, text: str) -> None:
        """Create a mediated device."""
        self._blocking.spend(Operation.CREATE)
        uuid = text
        if not _UUID.fullmatch(uuid):
            raise fails(errno.EINVAL, uuid)
        uuid = uuid[:36].lower()
        if uuid in self.devices:
            raise fails(errno.EEXIST, uuid)
        if vgpu_host.left(spec, slot) < 1:
            raise fails(errno.ENOSPC, uuid)
        self.add(vgpu_host, slot, spec, uuid)

    def add(
        self, vgpu_host: SimVgpuHost, slot: PciAddress, spec: VgpuTypeSpec, uuid: str, group: IommuGroup | None = None
    ) -> None:
        """Add a mediated device, whether or not it fits."""
        parent = self._tree.real_path(HostPath(f"{PARENTS}/{slot}"))
        device = SimMdev(uuid, spec, vgpu_host, slot, HostPath(f"{parent}/{uuid}"), group or self._new_group())
        vgpu_host.take(uuid, spec, slot)
        self.devices[uuid] = device
        self._place_device(device, parent)
        self._changed()

    def _new_group(self) -> IommuGroup:
        while self._next_group in self._vfio.groups:
            self._next_group += 1
        self._next_group += 1
        return IommuGroup(self._next_group - 1)

    def remove(self, uuid: str) -> None:
        """Remove a mediated device: the device leaves sysfs at once, and is freed when its user closes it."""
        device = self.devices[uuid]
        self._tree.remove(HostPath(f"{LIVE}/{uuid}"))
        self._blocking.spend(Operation.REMOVE)
        if self.devices.get(uuid) is not device:
            return  # the GPU was unplugged, or another writer has removed the device
        if not self._vfio.in_use(device.group, uuid):
            self._finish(device)
            return
        self._vfio.request_release(device.group, uuid, lambda: self._finish(device))
        self._changed()
        self._blocking.until(lambda: uuid not in self.devices, f"removal of {uuid}, which is in use")

    def _finish(self, device: SimMdev) -> None:
        self._vfio.remove_vfio_device(device.group, device.uuid, device.folder)
        self._vfio.leave(device.group, device.uuid)
        self._tree.remove(device.folder)
        self._tree.remove(HostPath(f"{_type_folder(device)}/devices/{device.uuid}"))
        device.vgpu_host.free(device.uuid)
        del self.devices[device.uuid]
        self._changed()

    def _write_remove(self, uuid: str, text: str) -> None:
        if written.number(text):
            self.remove(uuid)

    def _place_type(self, vgpu_host: SimVgpuHost, slot: PciAddress, parent: HostPath, spec: VgpuTypeSpec) -> None:
        folder = f"{parent}/mdev_supported_types/{spec.folder}"
        files = {
            "name": constant(spec.name),
            "device_api": constant("vfio-pci"),
            "description": constant(f"framebuffer={spec.size}, max_instance={spec.most}"),
            "available_instances": File(read=lambda: f"{vgpu_host.left(spec, slot)}\n"),
            "create": File(write=lambda text: self.create(vgpu_host, slot, spec, text)),
        }
        for name, file in files.items():
            self._tree.place(HostPath(f"{folder}/{name}"), file)
        self._tree.make(HostPath(f"{folder}/devices"))

    def _place_device(self, device: SimMdev, parent: HostPath) -> None:
        place, link = self._tree.place, self._tree.link
        place(HostPath(f"{device.folder}/remove"), File(write=lambda text: self._write_remove(device.uuid, text)))
        link(HostPath(f"{device.folder}/mdev_type"), HostPath(f"{parent}/mdev_supported_types/{device.spec.folder}"))
        self._tree.make(HostPath(DRIVER))
        link(HostPath(f"{device.folder}/driver"), HostPath(DRIVER))
        if self._vfio.group_nodes:
            link(HostPath(f"{device.folder}/iommu_group"), HostPath(f"/sys/kernel/iommu_groups/{device.group}"))
        link(HostPath(f"{LIVE}/{device.uuid}"), device.folder)
        link(HostPath(f"{_type_folder(device)}/devices/{device.uuid}"), device.folder)
        self._vfio.join(device.group, device.uuid, device.folder)
        self._vfio.add_vfio_device(device.group, device.uuid, device.folder)


def _type_folder(device: SimMdev) -> str:
    parent = device.folder.rpartition("/")[0]
    return f"{parent}/mdev_supported_types/{device.spec.folder}"

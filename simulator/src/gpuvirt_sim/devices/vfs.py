"""VFs that are created and removed on a simulated host, and the vGPUs that their GPU can carry on them.

VFs are removed when no process uses them any more; the kernel waits for their users. A reset, and binding the driver
again, clear a GPU's modes, as NVIDIA's manager forgets them; see `SimVgpuHost.forget`.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, parse_pci_address
from gpuvirt.facts.vgpu import Framework
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.drivers import is_vfio
from gpuvirt_sim.devices.function import SimFunction, VfIdentity
from gpuvirt_sim.devices.mdev import MdevBus
from gpuvirt_sim.devices.pci import PciBus
from gpuvirt_sim.devices.vendor_vfio import VendorVfioBus
from gpuvirt_sim.devices.vfio import Vfio
from gpuvirt_sim.devices.vgpu import SimVgpuHost
from gpuvirt_sim.files.blocking import Blocking

FIRST_VF_OFFSET = 4
"""The first VF of NVIDIA's boards is four functions after the physical one."""


class Carrier(msgspec.Struct, frozen=True):
    """A GPU that can carry vGPUs."""

    vgpu_host: SimVgpuHost
    framework: Framework
    on_vfs: bool
    """Whether the GPU's VFs carry the vGPUs; without VFs, the GPU carries no vGPU."""


class Vfs:
    """All GPUs that can carry vGPUs, and the VFs of all functions."""

    def __init__(self, pci: PciBus, vfio: Vfio, mdev: MdevBus, vendor_vfio: VendorVfioBus, blocking: Blocking) -> None:
        self.carriers: dict[PciAddress, Carrier] = {}
        self.next_group: int | None = 1
        """The IOMMU group of the next VF; None without an IOMMU."""
        self._pci = pci
        self._vfio = vfio
        self._mdev = mdev
        self._vendor_vfio = vendor_vfio
        self._blocking = blocking
        pci.switch_vfs = self.switch

    def offer(self, carrier: Carrier) -> None:
        """Let a GPU carry vGPUs on its VFs; raise ValueError where these have no IOMMU groups."""
        self.carriers[carrier.vgpu_host.gpu] = carrier
        functions = {slot: self._pci.functions[slot] for slot in carrier.vgpu_host.slots}
        folders = {slot: function.folder for slot, function in functions.items()}
        if carrier.framework is Framework.VENDOR_VFIO:
            self._vendor_vfio.offer(carrier.vgpu_host, folders, self._groups(functions))
            return
        self._mdev.offer(carrier.vgpu_host, folders)
        for slot in carrier.vgpu_host.slots:
            self._mdev.on_bind(slot)

    def _groups(self, functions: Mapping[PciAddress, SimFunction]) -> Mapping[PciAddress, IommuGroup]:
        groups = {slot: function.group for slot, function in functions.items() if function.group is not None}
        if groups.keys() != functions.keys():
            raise ValueError("functions that carry vendor-VFIO vGPUs need an IOMMU, and an IOMMU group each")
        return groups

    # --- the objects of native drivers (drivers.DriverObjects)

    def on_bind(self, slot: PciAddress) -> None:
        """Reset a GPU's modes, and show its types: its native driver was bound again."""
        if slot in self.carriers:
            self.carriers[slot].vgpu_host.forget()
        self._mdev.on_bind(slot)

    def on_unbind(self, slot: PciAddress, finish: Callable[[], None]) -> None:
        """Remove the mdevs, and the VFs that the driver created, of a function whose native driver is being unbound."""
        function = self._pci.functions[slot]
        rest = partial(self._mdev.on_unbind, slot, finish)
        if function.takes_numvfs and function.virtfns:
            self._switch_off(function, rest)
        else:
            rest()

    def on_unplug(self, slot: PciAddress) -> None:
        """Remove the VFs and the mdevs of an unplugged function, in use or not."""
        function = self._pci.functions[slot]
        for vf in list(function.virtfns):
            self._gone(function, self._pci.functions[vf])
        self._mdev.on_unplug(slot)

    # --- VFs

    def switch(self, function: SimFunction, count: int) -> None:
        """Create this many VFs, or remove all for 0; the caller waits until no process uses them."""
        if count:
            for number in range(count):
                self.add(function, number)
            return
        self._switch_off(function, lambda: None)
        self._blocking.until(lambda: not function.virtfns, f"removal of the VFs of {function.address}, one in use")

    def _switch_off(self, function: SimFunction, finish: Callable[[], None]) -> None:
        """Remove all VFs; call `finish` after the last one."""

        def gone(vf: SimFunction) -> None:
            self._gone(function, vf)
            if not function.virtfns:
                finish()

        for address in list(function.virtfns):
            vf = self._pci.functions[address]
            self._remove(vf, partial(gone, vf))

    def add(self, parent: SimFunction, number: int) -> PciAddress:
        """Create a VF, with its driver and the vGPU types that it can carry; raise ValueError for a used address."""
        address = vf_address(parent.address, number)
        if address in self._pci.functions:
            raise ValueError(f"there is a function at {address} already")
        kind = parent.vf or VfIdentity(parent.id, parent.class_code, parent.native_driver)
        function = SimFunction(
            address=address,
            id=kind.id,
            class_code=kind.class_code,
            folder=HostPath(f"{parent.folder.rpartition('/')[0]}/{address}"),
            subsystem=parent.subsystem or PciId(0, 0),
            revision=parent.revision,
            group=self._new_group(),
            numa_node=parent.numa_node,
            native_driver=kind.native_driver,
            physfn=parent.address,
        )
        if is_vfio(parent.driver):
            function.override = parent.driver  # vfio_pci_bus_notifier: the VFs of a VFIO driver get no native driver
        self._pci.add(function)
        self._carry(parent, function)
        with contextlib.suppress(OSError):  # a driver that rejects the VF does not fail the write
            self._pci.probe(function)
        return address

    def _new_group(self) -> IommuGroup | None:
        if self.next_group is None:
            return None
        while self.next_group in self._vfio.groups:
            self.next_group += 1
        self.next_group += 1
        return IommuGroup(self.next_group - 1)

    def _carry(self, parent: SimFunction, function: SimFunction) -> None:
        carrier = self.carriers.get(parent.address)
        if carrier is None or not carrier.on_vfs:
            return
        carrier.vgpu_host.slots.append(function.address)
        if carrier.framework is Framework.MDEV:
            self._mdev.offer(carrier.vgpu_host, {**self._folders(carrier.vgpu_host), function.address: function.folder})
        elif function.group is not None:
            self._vendor_vfio.offer_slot(carrier.vgpu_host, function.address, function.folder, function.group)

    def _folders(self, vgpu_host: SimVgpuHost) -> Mapping[PciAddress, HostPath]:
        return {slot: self._pci.functions[slot].folder for slot in vgpu_host.slots}

    def _remove(self, function: SimFunction, gone: Callable[[], None]) -> None:
        address, group = function.address, function.group
        function.leaving = True
        if group is not None and self._vfio.in_use(group, address):
            self._vfio.request_release(group, address, gone)
        elif function.driver == function.native_driver and self._pci.driver_objects is not None:
            self._pci.driver_objects.on_unbind(address, gone)
        else:
            gone()

    def _gone(self, parent: SimFunction, function: SimFunction) -> None:
        carrier = self.carriers.get(parent.address)
        if carrier is not None and function.address in carrier.vgpu_host.slots:
            if carrier.framework is Framework.VENDOR_VFIO and function.group is not None:
                self._vendor_vfio.remove_vf(carrier.vgpu_host, function.address, function.folder, function.group)
            self._mdev.withdraw(function.address)
            carrier.vgpu_host.slots.remove(function.address)
        self._pci.forget(function)


def vf_address(first: PciAddress, number: int) -> PciAddress:
    """Return the address of the VF of a number (from 0); raise ValueError where there is no such address."""
    domain, bus, rest = first.split(":")
    device, function = rest.split(".")
    routing = (int(bus, 16) << 8 | int(device, 16) << 3 | int(function)) + FIRST_VF_OFFSET + number
    text = f"{domain}:{routing >> 8:02x}:{routing >> 3 & 0x1F:02x}.{routing & 7}"
    return parse_pci_address(text)

"""The simulated PCI bus: functions, drivers, and the effect of writes to their files.

Behaviour and errnos are those of kernel 6.1, with which tests/contract compares them: binding a bound device fails with
EBUSY; binding an absent device, or one that the driver does not match, with ENODEV; unbinding from a driver that is not
bound to the device with ENODEV. No function of a group that a VM uses is bound to a native driver. While a writer waits
to unbind a device that is in use, its `driver_override`, `uevent` and `sriov_numvfs` block, and so does a write to
`reset`.
"""

import contextlib
import errno
from collections.abc import Callable

from gpuvirt.facts.ids import PciAddress, PciId
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.drivers import PF_DRIVERS, DriverObjects, is_vfio, leaves_dma
from gpuvirt_sim.devices.function import SimFunction, config_bytes, id_texts, resource, uevent_text
from gpuvirt_sim.devices.vfio import Vfio
from gpuvirt_sim.files import written
from gpuvirt_sim.files.blocking import Blocking
from gpuvirt_sim.files.durations import Operation
from gpuvirt_sim.files.tree import File, Tree, constant, fails

DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"


class PciBus:
    """All functions and drivers of a simulated host."""

    def __init__(self, tree: Tree, vfio: Vfio, blocking: Blocking, changed: Callable[[], None]) -> None:
        self.functions: dict[PciAddress, SimFunction] = {}
        self.removed: dict[PciAddress, SimFunction] = {}
        """Unplugged functions, which return when they are plugged in or the bus is rescanned."""
        self.enable_sriov = File(lambda: "Y\n" if self._vfio_makes_vfs else "N\n", self._write_enable_sriov)
        """The parameter of that name of vfio-pci."""
        self._vfio_makes_vfs = False
        self.dynamic_ids: dict[PciId, str] = {}
        """Drivers that were given an id (`new_id`, `vfio-pci.ids=`); they precede a function's native driver."""
        self.driver_objects: DriverObjects | None = None
        self.switch_vfs: Callable[[SimFunction, int], None] | None = None
        """Creates or removes VFs, after all checks."""
        self._tree = tree
        self._vfio = vfio
        self._blocking = blocking
        self._changed = changed
        tree.make(HostPath(DEVICES))
        tree.make(HostPath(DRIVERS))
        tree.place(HostPath("/sys/bus/pci/drivers_probe"), File(write=self._write_probe))
        tree.place(HostPath("/sys/bus/pci/rescan"), File(write=self._write_rescan))

    def add(self, function: SimFunction) -> None:
        """Add a function without a driver."""
        self.functions[function.address] = function
        self._place_files(function)
        link = HostPath(f"{DEVICES}/{function.address}")
        self._tree.link(link, function.folder)
        if function.group is not None:
            self._vfio.join(function.group, function.address, function.folder)
        self._changed()

    def add_driver(self, name: str) -> None:
        """Add a driver, unless it exists."""
        folder = f"{DRIVERS}/{name}"
        if self._tree.exists(HostPath(folder)):
            return
        self._tree.place(HostPath(f"{folder}/bind"), File(write=lambda text: self._write_bind(name, text)))
        self._tree.place(HostPath(f"{folder}/unbind"), File(write=lambda text: self._write_unbind(name, text)))

    def forget_driver(self, name: str) -> None:
        """Remove a driver, which must not be bound to a function."""
        self._tree.remove(HostPath(f"{DRIVERS}/{name}"))

    def unplug(self, address: PciAddress) -> None:
        """Unplug a function, in use or not; its driver is unbound first.

        The VFs of a physical function go with it (pciehp_unconfigure_device), and don't return when it is plugged in.
        """
        if self.driver_objects is not None:
            self.driver_objects.on_unplug(address)
        function = self.functions.pop(address)
        if function.driver is not None:
            self._release(function)
        if function.group is not None:
            self._vfio.leave(function.group, address)
        self._tree.remove(HostPath(f"{DEVICES}/{address}"))
        self._tree.remove(function.folder)
        function.leaving = False
        self.removed[address] = function
        self._changed()

    def forget(self, function: SimFunction) -> None:
        """Remove a VF, which does not return when the bus is rescanned."""
        self.unplug(function.address)
        del self.removed[function.address]
        parent = self.functions.get(function.physfn) if function.physfn is not None else None
        if parent is not None:
            self._tree.remove(HostPath(f"{parent.folder}/virtfn{function.vf_number}"))
            parent.virtfns.remove(function.address)

    def plug_in(self, address: PciAddress) -> None:
        """Plug an unplugged function in again. The kernel treats it as new, and binds its native driver."""
        function = self.removed.pop(address)
        function.driver, function.override, function.fell_off_bus = None, None, False
        self.add(function)
        with contextlib.suppress(OSError):  # a driver that rejects the function does not fail the scan
            self.probe(function)

    def bind(self, function: SimFunction, driver: str) -> None:
        """Bind a function to a driver."""
        if is_vfio(driver) and function.group is None:
            raise fails(errno.EINVAL, driver)  # vfio-pci needs an IOMMU: probe of 0000:65:00.0 failed with error -22
        if function.group is not None and not leaves_dma(driver) and self._vfio.is_owned(function.group):
            raise fails(errno.EBUSY, driver)
        function.driver = driver
        self.add_driver(driver)
        self._tree.link(HostPath(f"{function.folder}/driver"), HostPath(f"{DRIVERS}/{driver}"))
        self._tree.link(HostPath(f"{DRIVERS}/{driver}/{function.address}"), function.folder)
        if is_vfio(driver) and function.group is not None:
            self._vfio.add_vfio_device(function.group, function.address, function.folder)
        if driver == function.native_driver and self.driver_objects is not None:
            self.driver_objects.on_bind(function.address)
        self._changed()

    def unbind(self, function: SimFunction) -> None:
        """Unbind a function. While it is in use, its user is asked to release it, and the caller waits."""
        self._tree.remove(HostPath(f"{function.folder}/driver"))
        self._tree.remove(HostPath(f"{DRIVERS}/{function.driver}/{function.address}"))
        function.leaving = True
        self._blocking.spend(Operation.UNBIND)
        if not function.leaving:
            return  # it was unplugged
        if is_vfio(function.driver) and function.virtfns and self.switch_vfs is not None:
            self.switch_vfs(function, 0)  # vfio_pci_core_unregister_device, also where VMs use the VFs
        if function.group is not None and self._vfio.in_use(function.group, function.address):
            self._vfio.request_release(function.group, function.address, lambda: self._finish_unbind(function))
        elif self.driver_objects is not None and function.driver == function.native_driver:
            self.driver_objects.on_unbind(function.address, lambda: self._finish_unbind(function))
        else:
            self._finish_unbind(function)
        self._changed()
        self._blocking.until(lambda: not function.leaving, f"unbind of {function.address}, which is in use")

    def _finish_unbind(self, function: SimFunction) -> None:
        function.leaving = False
        self._release(function)
        self._changed()

    def _release(self, function: SimFunction) -> None:
        self._tree.remove(HostPath(f"{function.folder}/driver"))
        self._tree.remove(HostPath(f"{DRIVERS}/{function.driver}/{function.address}"))
        if is_vfio(function.driver) and function.group is not None:
            self._vfio.remove_vfio_device(function.group, function.address, function.folder)
        function.driver = None

    def probe(self, function: SimFunction) -> None:
        """Bind a function without a driver to the driver that matches it, where that one is loaded."""
        desired = function.override or self.dynamic_ids.get(function.id) or function.native_driver
        if function.driver is None and self._tree.exists(HostPath(f"{DRIVERS}/{desired}")):
            self.bind(function, desired or "")

    def _find(self, text: str) -> SimFunction:
        function = self.functions.get(PciAddress(written.name(text)))
        if function is None:
            raise fails(errno.ENODEV, text)
        return function

    def _write_bind(self, driver: str, text: str) -> None:
        self._blocking.spend(Operation.BIND)
        function = self._find(text)
        matching = (
            {function.override} if function.override else {self.dynamic_ids.get(function.id), function.native_driver}
        )
        if driver not in matching:
            raise fails(errno.ENODEV, text)
        if function.leaving:
            self._hang(function, "bind")
        if function.driver is not None:
            raise fails(errno.EBUSY, text)
        self.bind(function, driver)

    def _write_unbind(self, driver: str, text: str) -> None:
        function = self._find(text)
        if function.driver != driver:
            raise fails(errno.ENODEV, text)
        if function.leaving:
            self._hang(function, "unbind")
        self.unbind(function)

    def _write_probe(self, text: str) -> None:
        self._blocking.spend(Operation.BIND)
        function = self._find(text)
        if function.leaving:
            self._hang(function, "drivers_probe")
        try:
            self.probe(function)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise fails(errno.EINVAL, text) from error
            # An error of the driver itself is logged, and the write succeeds (drivers/base/dd.c).

    def _write_rescan(self, text: str) -> None:
        if written.number(text):
            for address in list(self.removed):
                self.plug_in(address)

    def _hang(self, function: SimFunction, what: str) -> None:
        self._blocking.until(lambda: not function.leaving, f"{what} of {function.address}, which waits to be unbound")

    def _read_override(self, function: SimFunction) -> str:
        if function.leaving:
            self._hang(function, "driver_override")
        return (function.override or "(null)") + "\n"

    def _write_override(self, function: SimFunction, text: str) -> None:
        if function.leaving:
            self._hang(function, "driver_override")
        function.override = written.override(text)

    def _read_vfs(self, function: SimFunction) -> str:
        if function.leaving:
            self._hang(function, "sriov_numvfs")
        return f"{len(function.virtfns)}\n"

    def _write_enable_sriov(self, text: str) -> None:
        self._vfio_makes_vfs = text.strip() in {"Y", "y", "1"}

    def _write_vfs(self, function: SimFunction, text: str) -> None:
        """Create or remove VFs, after drivers/pci/iov.c of 6.1."""
        self._blocking.spend(Operation.SRIOV_NUMVFS)
        count = written.short(text)
        if count > (function.total_vfs or 0):
            raise fails(errno.ERANGE, text)
        if function.leaving:
            self._hang(function, "sriov_numvfs")
        if count == len(function.virtfns):
            return
        native = function.driver == function.native_driver and function.takes_numvfs
        by_vfio = self._vfio_makes_vfs and is_vfio(function.driver)
        if function.driver is None or not (native or by_vfio or function.driver in PF_DRIVERS):
            raise fails(errno.ENOENT, text)
        if count and function.virtfns:
            raise fails(errno.EBUSY, text)
        if self.switch_vfs is not None:
            self.switch_vfs(function, count)

    def _read_uevent(self, function: SimFunction) -> str:
        if function.leaving:
            self._hang(function, "uevent")
        return uevent_text(function)

    def _write_reset(self, function: SimFunction, text: str) -> None:
        if written.number(text) != 1:
            raise fails(errno.EINVAL, text)
        if function.leaving:
            self._hang(function, "reset")
        bus = function.address.rpartition(":")[0]
        if function.physfn is None and sum(address.rpartition(":")[0] == bus for address in self.functions) > 1:
            # no simulated card can reset a single function, and a bus reset would reset the others on the bus
            raise fails(errno.ENOTTY, text)

    def _write_remove(self, function: SimFunction, text: str) -> None:
        if written.number(text):
            if function.group is not None and self._vfio.in_use(function.group, function.address):
                self.unbind(function)
            self.unplug(function.address)

    def _place_files(self, function: SimFunction) -> None:
        files = {name: constant(content) for name, content in id_texts(function).items()}
        files["numa_node"] = File(read=lambda: f"{function.numa_node}\n")
        files["config"] = File(read=lambda: config_bytes(function))
        files["uevent"] = File(read=lambda: self._read_uevent(function))
        files["driver_override"] = File(
            read=lambda: self._read_override(function), write=lambda text: self._write_override(function, text)
        )
        files["reset"] = File(write=lambda text: self._write_reset(function, text))
        files["reset_method"] = constant("flr bus")
        files["resource"] = File(read=resource)
        files["remove"] = File(write=lambda text: self._write_remove(function, text))
        if function.total_vfs is not None:
            files["sriov_totalvfs"] = constant(str(function.total_vfs))
            files["sriov_numvfs"] = File(
                read=lambda: self._read_vfs(function), write=lambda text: self._write_vfs(function, text)
            )
        for name, file in files.items():
            self._tree.place(HostPath(f"{function.folder}/{name}"), file)
        if function.group is not None:
            self._tree.link(
                HostPath(f"{function.folder}/iommu_group"), HostPath(f"/sys/kernel/iommu_groups/{function.group}")
            )
        if function.physfn is not None:
            self._place_vf_links(function, self.functions[function.physfn])

    def _place_vf_links(self, function: SimFunction, parent: SimFunction) -> None:
        if function.address not in parent.virtfns:
            parent.virtfns.append(function.address)
        number = function.vf_number = parent.virtfns.index(function.address)
        self._tree.link(HostPath(f"{function.folder}/physfn"), parent.folder)
        self._tree.link(HostPath(f"{parent.folder}/virtfn{number}"), function.folder)

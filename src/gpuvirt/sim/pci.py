"""The simulated PCI bus: functions, drivers, and what writes to their files do.

Behaviour and errnos are those of kernel 6.1, with which tests/contract compares them: binding a bound device is EBUSY,
an absent one, or one that the driver would not take, ENODEV; unbinding from a driver that hasn't got the device is
ENODEV; no function of a group that a machine has goes to a native driver. While somebody waits to unbind a device that
is in use, its `driver_override`, `uevent` and `sriov_numvfs` hang, and so does a write to `reset`.
"""

import contextlib
import errno
import re
from collections.abc import Callable
from typing import Protocol

from gpuvirt.facts.ids import PciAddress, PciId
from gpuvirt.facts.pci import GROUP_FRIENDLY_DRIVERS
from gpuvirt.paths import HostPath
from gpuvirt.sim import written
from gpuvirt.sim.bars import resource
from gpuvirt.sim.blocking import Blocking
from gpuvirt.sim.durations import Operation
from gpuvirt.sim.function import SimFunction, config_bytes, id_texts, uevent_text
from gpuvirt.sim.tree import File, Tree, constant, fails
from gpuvirt.sim.vfio import Vfio

DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"
VFIO_DRIVER = re.compile(r"[a-z0-9_-]+[_-]vfio[_-]pci|vfio-pci")
"""A driver that is vfio-pci or stands on vfio-pci-core; the kernel's own are all named so."""
PF_DRIVERS = frozenset({"pci-pf-stub"})
"""Drivers that do nothing but let VFs be made; vfio-pci does with its parameter enable_sriov."""


def is_vfio(driver: str | None) -> bool:
    """Return whether a driver makes VFIO devices of functions."""
    return driver is not None and VFIO_DRIVER.fullmatch(driver) is not None


def leaves_dma(driver: str) -> bool:
    """Return whether a driver leaves a function's DMA to whoever owns its IOMMU group."""
    return driver in GROUP_FRIENDLY_DRIVERS or is_vfio(driver)


class Carried(Protocol):
    """What a native driver brings with it and takes away again."""

    def appear(self, slot: PciAddress, /) -> None:
        """The driver has the function."""
        ...

    def take_back(self, slot: PciAddress, finish: Callable[[], None], /) -> None:
        """The driver is to go; `finish` runs when nothing of what it brought is in use any more."""
        ...

    def lose(self, slot: PciAddress, /) -> None:
        """The function was pulled out."""
        ...


class PciBus:
    """All functions and drivers of a machine."""

    def __init__(self, tree: Tree, vfio: Vfio, blocking: Blocking, changed: Callable[[], None]) -> None:
        self.functions: dict[PciAddress, SimFunction] = {}
        self.removed: dict[PciAddress, SimFunction] = {}
        """Functions that were taken away, and that come back when they are plugged in or the bus is rescanned."""
        self.enable_sriov = File(lambda: "Y\n" if self._vfio_makes_vfs else "N\n", self._write_enable_sriov)
        """vfio-pci's parameter of that name."""
        self._vfio_makes_vfs = False
        self.dynamic_ids: dict[PciId, str] = {}
        """Drivers that were told of an id (`new_id`, `vfio-pci.ids=`): they are asked before a function's own."""
        self.carried: Carried | None = None
        self.switch_vfs: Callable[[SimFunction, int], None] | None = None
        """What happens when so many VFs are asked for, all checks made."""
        self._tree = tree
        self._vfio = vfio
        self._blocking = blocking
        self._changed = changed
        tree.make(HostPath(DEVICES))
        tree.make(HostPath(DRIVERS))
        tree.place(HostPath("/sys/bus/pci/drivers_probe"), File(write=self._write_probe))
        tree.place(HostPath("/sys/bus/pci/rescan"), File(write=self._write_rescan))

    def add(self, function: SimFunction) -> None:
        """Make a function appear, without a driver."""
        self.functions[function.address] = function
        self._place_files(function)
        link = HostPath(f"{DEVICES}/{function.address}")
        self._tree.link(link, function.folder)
        if function.group is not None:
            self._vfio.join(function.group, function.address, function.folder)
        self._changed()

    def add_driver(self, name: str) -> None:
        """Make a driver available; one that is there stays as it is."""
        folder = f"{DRIVERS}/{name}"
        if self._tree.exists(HostPath(folder)):
            return
        self._tree.place(HostPath(f"{folder}/bind"), File(write=lambda text: self._write_bind(name, text)))
        self._tree.place(HostPath(f"{folder}/unbind"), File(write=lambda text: self._write_unbind(name, text)))

    def forget_driver(self, name: str) -> None:
        """Take a driver out of the kernel, which no function may have."""
        self._tree.remove(HostPath(f"{DRIVERS}/{name}"))

    def take_away(self, address: PciAddress) -> None:
        """Unplug a function; the driver lets go of it first, in use or not."""
        function = self.functions.pop(address)
        if self.carried is not None:
            self.carried.lose(address)
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
        """A VF goes, and does not come back when the bus is rescanned."""
        self.take_away(function.address)
        del self.removed[function.address]
        parent = self.functions.get(function.physfn) if function.physfn is not None else None
        if parent is not None:
            self._tree.remove(HostPath(f"{parent.folder}/virtfn{function.vf_number}"))
            parent.virtfns.remove(function.address)

    def bring_back(self, address: PciAddress) -> None:
        """Plug an unplugged function in again; the kernel knows nothing of it, and gives it its native driver."""
        function = self.removed.pop(address)
        function.driver, function.override, function.fell_off_bus = None, None, False
        self.add(function)
        with contextlib.suppress(OSError):  # a driver that can't have it is no failure of the scan
            self.probe(function)

    def bind(self, function: SimFunction, driver: str) -> None:
        """Give a function to a driver."""
        if is_vfio(driver) and function.group is None:
            raise fails(errno.EINVAL, driver)  # vfio-pci needs an IOMMU: probe of 0000:65:00.0 failed with error -22
        if function.group is not None and not leaves_dma(driver) and self._vfio.is_owned(function.group):
            raise fails(errno.EBUSY, driver)
        function.driver = driver
        self.add_driver(driver)
        self._tree.link(HostPath(f"{function.folder}/driver"), HostPath(f"{DRIVERS}/{driver}"))
        self._tree.link(HostPath(f"{DRIVERS}/{driver}/{function.address}"), function.folder)
        if is_vfio(driver) and function.group is not None:
            self._vfio.enlist(function.group, function.address, function.folder)
        if driver == function.native_driver and self.carried is not None:
            self.carried.appear(function.address)
        self._changed()

    def unbind(self, function: SimFunction) -> None:
        """Take a function from its driver; while it is in use the caller waits, and its user is asked to let go."""
        self._tree.remove(HostPath(f"{function.folder}/driver"))
        self._tree.remove(HostPath(f"{DRIVERS}/{function.driver}/{function.address}"))
        function.leaving = True
        self._blocking.spend(Operation.UNBIND)
        if not function.leaving:
            return  # it was pulled out
        if is_vfio(function.driver) and function.virtfns and self.switch_vfs is not None:
            self.switch_vfs(function, 0)  # vfio_pci_core_unregister_device, whoever has them
        if function.group is not None and self._vfio.in_use(function.group, function.address):
            self._vfio.ask_back(function.group, function.address, lambda: self._finish_unbind(function))
        elif self.carried is not None and function.driver == function.native_driver:
            self.carried.take_back(function.address, lambda: self._finish_unbind(function))
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
            self._vfio.discharge(function.group, function.address, function.folder)
        function.driver = None

    def probe(self, function: SimFunction) -> None:
        """Give a function to the driver that is wanted for it, where that is loaded and nothing has it."""
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
            # What a driver itself refuses is logged, and the writer hears nothing of it (drivers/base/dd.c).

    def _write_rescan(self, text: str) -> None:
        if written.number(text):
            for address in list(self.removed):
                self.bring_back(address)

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
        """Switch VFs on or off, after drivers/pci/iov.c of 6.1."""
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
            raise fails(
                errno.ENOTTY, text
            )  # no simulated card can reset one function, and a bus reset hits its neighbours

    def _write_remove(self, function: SimFunction, text: str) -> None:
        if written.number(text):
            if function.group is not None and self._vfio.in_use(function.group, function.address):
                self.unbind(function)
            self.take_away(function.address)

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

"""A simulated kernel, which answers as a real one was observed to, and on which VMs, users and faults act.

The first half implements the `Kernel` that gpuvirt works through. The second half acts on the host from outside: a VM
takes a GPU, a card falls off its bus, another program rebinds a driver. The kernel records reads and writes, so that a
test can check what gpuvirt did.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES
from gpuvirt.hardware.access.openfiles import VFIO_DEVICE, OpenFile
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.cdevs import CdevFile
from gpuvirt_sim.devices.drivers import leaves_dma
from gpuvirt_sim.devices.mdev import MdevBus
from gpuvirt_sim.devices.nativenodes import NativeNodes
from gpuvirt_sim.devices.nvidia import NvidiaDriver
from gpuvirt_sim.devices.pci import PciBus
from gpuvirt_sim.devices.vendor_vfio import VendorVfioBus
from gpuvirt_sim.devices.vfio import CDEVS, Vfio, group_number, group_of_node
from gpuvirt_sim.devices.vfs import Vfs
from gpuvirt_sim.files.blocking import Blocking
from gpuvirt_sim.files.faults import Faults
from gpuvirt_sim.files.processes import Process, Processes
from gpuvirt_sim.files.tree import DEVICE_NUMBERS, DeviceNode, File, Folder, Link, Tree, constant, fails

__all__ = ["OUR_PID", "Process", "SimKernel"]

OUR_PID = 1


class SimKernel:
    """A simulated host in memory."""

    def __init__(self, *, iommufd: bool = False, group_nodes: bool = True, wait: bool = False) -> None:
        self.tree = Tree()
        self.tree.make(DEVICE_NUMBERS)
        self.blocking = Blocking(wait=wait)
        self.faults = Faults()
        self.vfio = Vfio(self.tree, iommufd=iommufd, group_nodes=group_nodes, changed=self._changed)
        self.pci = PciBus(self.tree, self.vfio, self.blocking, self._changed)
        self.mdev = MdevBus(self.tree, self.vfio, self.blocking, self._changed)
        self.processes = Processes(self.tree)
        self.vendor_vfio = VendorVfioBus(self.tree, self.vfio, self.blocking, self._changed)
        self.vfs = Vfs(self.pci, self.vfio, self.mdev, self.vendor_vfio, self.blocking)
        self.nvidia = NvidiaDriver(self.tree, self.pci.functions, self.vfs, self.processes.has_open)
        self.native_nodes = NativeNodes(self.tree, self.pci.functions, self.processes, self.nvidia)
        self.pci.driver_objects = self.native_nodes
        self.writes: list[tuple[HostPath, bytes]] = []
        self.reads: set[HostPath] = set()
        self._wakers: list[Callable[[], None]] = []
        self._loses_uevents = False
        self._boots = 0
        self.reboot_id()

    # --- the Kernel that gpuvirt works through

    @property
    def pids(self) -> frozenset[int]:
        """The agent's pid, which the simulated /proc does not show."""
        return frozenset({OUR_PID})

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first bytes of a file."""
        with self.blocking.condition:
            self.reads.add(path)
            instead = self.faults.apply(path)
            if instead is not None:
                return instead[:limit]
            node = self.tree.find(path)
            if not isinstance(node, File):
                raise fails(errno.EISDIR if isinstance(node, Folder) else errno.EINVAL, path)
            if node.read is None:
                raise fails(errno.EACCES, path)
            content = node.read()
            return (content.encode() if isinstance(content, str) else content)[:limit]

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file. The effect is complete when this returns, unless the kernel would keep the writer asleep."""
        with self.blocking.condition:
            node = self.tree.find(path)
            if not isinstance(node, File) or node.write is None:
                raise fails(errno.EISDIR if isinstance(node, Folder) else errno.EACCES, path)
            self.faults.apply_to_write(path)
            self.blocking.until(lambda: path not in self.faults.asleep, f"{path} keeps its writers asleep")
            if data:  # the kernel does not call the attribute for an empty write
                self.writes.append((path, data))
                try:
                    node.write(data.decode())
                except OSError as error:
                    error.filename = path
                    raise

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder."""
        with self.blocking.condition:
            self.faults.apply(path)
            return list(self.tree.folder(path).entries)

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        with self.blocking.condition:
            self.faults.apply(path)
            node = self.tree.find(path, follow=False)
            if not isinstance(node, Link):
                raise fails(errno.EINVAL, path)
            return node.target

    def device_number(self, path: HostPath, /) -> int:
        """Return the device number of a node."""
        with self.blocking.condition:
            self.faults.apply(path)
            return self._number_of(path)

    def _number_of(self, path: HostPath) -> int:
        node = self.tree.find(path)
        return node.number if isinstance(node, DeviceNode) else 0

    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        """Hold a VFIO group open."""
        node = HostPath(f"/dev/vfio/{group}")
        with self.blocking.condition:
            try:
                self.faults.apply(node)
                self.vfio.open(group, OUR_PID)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise DeviceBusyError(f"{node} is open in another process") from error
                raise LeaseUnavailableError(f"{node} can't be opened: {error.strerror}") from error
        try:
            yield
        finally:
            with self.blocking.condition:
                self.vfio.close(group)
                self._changed(quiet=True)

    @contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        """Hold VFIO devices open, until the kernel asks for them."""
        with self.blocking.condition:
            try:
                held = self._open_devices(names, OUR_PID, lease=True)
            except OSError as error:
                if error.errno in {errno.EBUSY, errno.EINVAL}:
                    raise DeviceBusyError(f"a device of {', '.join(names)} is in use by another process") from error
                raise LeaseUnavailableError(f"{', '.join(names)} can't be opened: {error.strerror}") from error
        try:
            yield
        finally:
            with self.blocking.condition:
                self.vfio.close_devices(lambda file: file in held)
                self._changed(quiet=True)

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the nodes that processes have open, or have `mapped` as well."""
        for pid in [name for name in self.listdir(HostPath("/proc")) if name.isdigit()]:
            for links in ("fd", "map_files") if mapped else ("fd",):
                with suppress(FileNotFoundError):  # the process has ended, or shows no files
                    yield from self._files_of(pid, links)

    def _files_of(self, pid: str, links: str) -> Iterator[OpenFile]:
        folder = HostPath(f"/proc/{pid}/{links}")
        for number in self.listdir(folder):
            link = HostPath(f"{folder}/{number}")
            path = HostPath(self.readlink(link))
            deleted = self.processes.deleted_number(link)
            if deleted is not None:
                yield OpenFile(int(pid), path, deleted)
            elif path == VFIO_DEVICE:
                yield OpenFile(int(pid), path, 0)
            elif self.tree.exists(path):
                yield OpenFile(int(pid), path, self._number_of(path))  # that of the open file: its path may be denied
            elif path.startswith((CDEVS, "/dev/vfio/")):  # the node is deleted, but the file is still open
                group = group_of_node(path)
                yield OpenFile(int(pid), HostPath(f"{path} (deleted)"), 0 if group is None else group_number(group))

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake` when a device appears, disappears or changes its driver."""
        self._wakers.append(wake)
        return lambda: self._wakers.remove(wake)

    # --- events from outside

    def lose_uevents(self) -> None:
        """Send no uevent any more, as to a program whose buffer was full."""
        self._loses_uevents = True

    def reboot_id(self) -> None:
        """Give the host another boot id, as a reboot does."""
        self._boots += 1
        self.tree.place(
            HostPath("/proc/sys/kernel/random/boot_id"), constant(f"00000000-0000-4000-8000-{self._boots:012d}")
        )

    def start_vm(self, group: IommuGroup, command: str = "qemu-system-x86", *, devices: bool = True) -> Process:
        """Start a VM that takes all devices of a group, or only opens the group; fail as QEMU would."""
        with self.blocking.condition:
            process = self.processes.next(command)
            self.vfio.open(group, process.pid)  # where this fails, the group stays with its user
            try:
                if devices:
                    self.use_devices(group)
                else:
                    self.vfio.own(group, self._is_friendly)
            except OSError:
                self.vfio.close(group)
                raise
            self.processes.show(process, [f"/dev/vfio/{group}", *([VFIO_DEVICE] if devices else [])])
            return process

    def use_devices(self, group: IommuGroup) -> None:
        """Let the process that has a group open take all its devices, as a VM does."""
        with self.blocking.condition:
            self.vfio.own(group, self._is_friendly)
            for device in list(self.vfio.groups[group].vfio_devices):
                self.vfio.use(group, device)

    def open_devices(self, names: Sequence[str], command: str = "qemu-system-x86", *, bind: bool = True) -> Process:
        """Start a VM that takes devices by their own nodes (`vfio0`), or only opens the nodes."""
        with self.blocking.condition:
            process = self.processes.next(command)
            self._open_devices(names, process.pid, bind=bind)
            self.processes.show(process, [f"/dev/vfio/devices/{name}" for name in names])
            return process

    def _open_devices(
        self, names: Sequence[str], pid: int, *, bind: bool = True, lease: bool = False
    ) -> list[CdevFile]:
        files: list[CdevFile] = []
        try:
            for name in names:
                files.append(self.vfio.open_device(name, pid))
                if bind:
                    self.vfio.bind_device(files[-1], self._is_friendly)
                files[-1].lease = lease
        except OSError:
            self.vfio.close_devices(lambda file: file in files)
            raise
        return files

    def start_process(self, command: str, *nodes: str, pod: str | None = None) -> Process:
        """Start a process that has nodes under `/dev` open, as CUDA has `/dev/nvidia0`; `pod` is its pod's UID."""
        with self.blocking.condition:
            process = self.processes.next(command)
            self.processes.show(process, nodes, pod)
            return process

    def nodes_of(self, address: PciAddress) -> tuple[str, ...]:
        """Return the nodes of a function's native driver: `/dev/nvidia0`, `/dev/dri/renderD128`, `/dev/snd/...`."""
        return (*self.nvidia.nodes_of(address), *self.native_nodes.of(address))

    def native_users(self, address: PciAddress) -> tuple[Process, ...]:
        """Return the processes that have a node of a function's native driver open."""
        users = {process for node in self.nodes_of(address) for process in self.processes.having_open(node)}
        return tuple(sorted(users, key=lambda process: process.pid))

    def open_native(self, address: PciAddress, command: str = "python3", *nodes: str) -> Process:
        """Start a process that opens nodes of a function's native driver, the first of them if none is given.

        Raises ENOENT for a function without nodes, and ENODEV for a GPU that NVIDIA's driver has locked.
        """
        with self.blocking.condition:
            found = self.nodes_of(address)
            if not found or not set(nodes) <= set(found):
                raise fails(errno.ENOENT, "/dev")
            if self.nvidia.is_locked(address):
                raise fails(errno.ENODEV, found[0])
            return self.start_process(command, *(nodes or found[:1]))

    def end_vm(self, process: Process) -> None:
        """End a VM: its devices are free, and writers that waited for them continue."""
        with self.blocking.condition:
            for group in list(self.vfio.groups.values()):
                if group.user == process.pid:
                    self.vfio.close(group.number)
            self.vfio.close_devices(lambda file: file.pid == process.pid)
            self.processes.end(process)
            self.nvidia.closed()
            self.native_nodes.closed()
            self._changed(quiet=True)

    def unplug(self, address: PciAddress) -> None:
        """Unplug a function."""
        with self.blocking.condition:
            self.pci.unplug(address)

    def plug_in(self, address: PciAddress) -> None:
        """Plug an unplugged function in again."""
        with self.blocking.condition:
            self.pci.plug_in(address)

    def rebind(self, address: PciAddress, driver: str | None) -> None:
        """Bind a function to another driver, as an administrator or another program would."""
        with self.blocking.condition:
            function = self.pci.functions[address]
            function.override = driver
            if function.driver is not None:
                self.pci.unbind(function)
            if driver is not None:
                self.pci.bind(function, driver)

    def fall_off_bus(self, address: PciAddress, *, fallen: bool = True) -> None:
        """Make a card stop answering, or answer again; the kernel reports neither."""
        self.pci.functions[address].fell_off_bus = fallen

    def delete_node(self, group: IommuGroup) -> None:
        """Delete a group's node by hand, without a uevent."""
        with self.blocking.condition:
            self.vfio.hidden_nodes.add(group)
            self.tree.remove(HostPath(f"/dev/vfio/{group}"))

    def restore_node(self, group: IommuGroup) -> None:
        """Restore a deleted node, if its group still has VFIO devices, without a uevent."""
        with self.blocking.condition:
            self.vfio.hidden_nodes.discard(group)
            if self.vfio.groups[group].vfio_devices:
                self.vfio.show_node(group)

    def _is_friendly(self, device: str) -> bool:
        function = self.pci.functions.get(PciAddress(device))
        if function is None or function.driver is None or leaves_dma(function.driver):
            return True
        # A VF that carries a vendor-VFIO vGPU is a VFIO device, although its driver is the vendor's.
        return function.group is not None and device in self.vfio.groups[function.group].vfio_devices

    def _changed(self, *, quiet: bool = False) -> None:
        with self.blocking.condition:
            self.blocking.condition.notify_all()
        if not (quiet or self._loses_uevents):
            for wake in list(self._wakers):
                wake()

"""The kernel and the programs of an explored process: each operation is a point, and ends a killed process.

At the core level the points are writes, leases, programs, and the first read of each observation: a list of devices,
of nodes or of processes. At the whole level each operation is a point.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.hardware.access.tools import Program
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.explore.reduction import KERNEL
from tests.explore.scheduler import KilledError, Process, Scheduler

FIRST_READS = ("/sys/bus/pci/devices", "/sys/class/vfio")
"""The first reads of observations: all functions, and the nodes' numbers before a read of all processes."""


class Watch:
    """Receives the operations of processes on the host before they are made."""

    def desired_by(self, process: Process) -> str | None:
        """Return the desired mode that a process has observed, None if it may not have observed it yet."""
        raise NotImplementedError

    def write(self, process: Process, path: HostPath, data: bytes, desired: str | None) -> None:
        """Receive a write to a file, decided when this mode was `desired`."""
        raise NotImplementedError

    def command(self, process: Process, *command: str) -> None:
        """Receive a run of a program."""
        raise NotImplementedError

    def walk(self, process: Process) -> None:
        """Receive a read of all processes."""
        raise NotImplementedError


class ExploredKernel:
    """The kernel of one process."""

    def __init__(
        self, kernel: Callable[[], SimKernel], scheduler: Scheduler, process: Process, watch: Watch, *, whole: bool
    ) -> None:
        self._now = kernel
        self._scheduler = scheduler
        self._process = process
        self._watch = watch
        self._whole = whole

    @property
    def pids(self) -> frozenset[int]:
        return self._now().pids

    def _point(self, what: str, *, core: bool = False) -> SimKernel:
        if self._process.dead:
            raise KilledError
        if core or self._whole:
            self._scheduler.point(what, is_read=not core)
        if core and self._scheduler.story is not None:
            self._scheduler.add_line(f"    {self._process.name}: {what}")
        return self._touched()

    def _touched(self) -> SimKernel:
        self._scheduler.touch(KERNEL)
        return self._now()

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        return self._point(f"read {path}").read(path, limit=limit)

    def write(self, path: HostPath, data: bytes, /) -> None:
        desired = self._watch.desired_by(self._process)
        kernel = self._point(f"write {data.decode().strip()!r} to {path}", core=True)
        self._watch.write(self._process, path, data, desired)
        kernel.write(path, data)
        self._scheduler.point("what follows the write")

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        return self._point(f"list {path}", core=path in FIRST_READS).listdir(path)

    def readlink(self, path: HostPath, /) -> str:
        return self._point(f"readlink {path}").readlink(path)

    def device_number(self, path: HostPath, /) -> int:
        return self._point(f"stat {path}").device_number(path)

    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        kernel = self._point(f"open group {group}", core=True)
        with kernel.lease(group):
            yield
            self._touched()

    @contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        kernel = self._point(f"open {' '.join(names)}", core=True)
        with kernel.lease_devices(names):
            yield
            self._touched()

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the open files of processes; each process is a point, so that files may change meanwhile."""
        self._point("walk through all processes", core=True)
        self._watch.walk(self._process)
        for file in self._now().open_files(mapped=mapped):
            self._touched()
            yield file

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        return self._touched().on_uevent(wake)


class ExploredTools:
    """The programs of one process."""

    def __init__(self, tools: Callable[[], SimTools], scheduler: Scheduler, process: Process, watch: Watch) -> None:
        self._now = tools
        self._scheduler = scheduler
        self._process = process
        self._watch = watch

    def _begin(self, *command: str) -> SimTools:
        self._scheduler.point(" ".join(command))
        self._scheduler.add_line(f"    {self._process.name}: {' '.join(command)}")
        self._scheduler.touch(KERNEL)
        self._watch.command(self._process, *command)
        return self._now()

    def modprobe(self, module: str) -> None:
        self._begin("modprobe", module).modprobe(module)

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        self._begin("sriov-manage", "-e" if enable else "-d", address).sriov_manage(address, enable)

    def nvidia_smi(self, *arguments: str) -> str:
        return self._begin("nvidia-smi", *arguments).nvidia_smi(*arguments)

    def demand(self, program: Program) -> None:
        self._scheduler.touch(KERNEL)
        self._now().demand(program)

    def demand_module(self, module: str) -> None:
        self._scheduler.touch(KERNEL)
        self._now().demand_module(module)

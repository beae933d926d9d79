"""A host whose process is killed at one of its operations: its later operations have no effect."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.hardware.access.tools import Program, Tools
from gpuvirt.paths import HostPath


class KilledError(BaseException):
    """The process was killed."""


class Countdown:
    """The number of operations before a process is killed."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self) -> None:
        """Count one operation, or raise KilledError before it."""
        if self.left <= 0:
            raise KilledError
        self.left -= 1

    def check(self) -> None:
        """Raise KilledError after the kill: code that cleans up does not run either."""
        if self.left <= 0:
            raise KilledError


class KilledKernel:
    """The kernel of a process that is killed after a number of writes."""

    def __init__(self, kernel: Kernel, countdown: Countdown) -> None:
        self._kernel = kernel
        self._countdown = countdown

    @property
    def pids(self) -> frozenset[int]:
        return self._kernel.pids

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        return self._kernel.read(path, limit=limit)

    def write(self, path: HostPath, data: bytes, /) -> None:
        self._countdown.spend()
        self._kernel.write(path, data)
        self._countdown.check()

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        return self._kernel.listdir(path)

    def readlink(self, path: HostPath, /) -> str:
        return self._kernel.readlink(path)

    def device_number(self, path: HostPath, /) -> int:
        return self._kernel.device_number(path)

    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        with self._kernel.lease(group):
            yield

    @contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        with self._kernel.lease_devices(names):
            yield

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        return self._kernel.open_files(mapped=mapped)

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        return self._kernel.on_uevent(wake)


class KilledTools:
    """The programs of a process that is killed after a number of operations."""

    def __init__(self, tools: Tools, countdown: Countdown) -> None:
        self._tools = tools
        self._countdown = countdown

    def modprobe(self, module: str) -> None:
        self._countdown.spend()
        self._tools.modprobe(module)
        self._countdown.check()

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        self._countdown.spend()
        self._tools.sriov_manage(address, enable)
        self._countdown.check()

    def nvidia_smi(self, *arguments: str) -> str:
        return self._tools.nvidia_smi(*arguments)

    def demand(self, program: Program) -> None:
        self._tools.demand(program)

    def demand_module(self, module: str) -> None:
        self._tools.demand_module(module)

"""A host's kernel as a container sees it: without the host's nodes, or in a PID namespace of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from gpuvirt.errors import LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.hardware.usage.processes import NAMESPACE, NAMESPACES
from gpuvirt.paths import HostPath


class ContainerKernel:
    """The same kernel, but for what a container lacks."""

    def __init__(self, kernel: Kernel, *, has_nodes: bool = True, sees_host: bool = True) -> None:
        self._kernel = kernel
        self._has_nodes = has_nodes
        self._sees_host = sees_host

    @property
    def pids(self) -> frozenset[int]:
        """No host process: in the guest the same process acts as the VM and as gpuvirt."""
        return frozenset()

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        return self._kernel.read(path, limit=limit)

    def write(self, path: HostPath, data: bytes, /) -> None:
        self._kernel.write(path, data)

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        if path.startswith("/dev/vfio") and not self._has_nodes:
            raise FileNotFoundError(2, "No such file or directory", path)
        names = self._kernel.listdir(path)
        return sorted({*names, "pid"}) if path == NAMESPACES and not self._sees_host else names

    def readlink(self, path: HostPath, /) -> str:
        return self._kernel.readlink(path) if self._sees_host or path != NAMESPACE else "pid:[4026532298]"

    def device_number(self, path: HostPath, /) -> int:
        if path.startswith("/dev/vfio") and not self._has_nodes:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self._kernel.device_number(path)

    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        if not self._has_nodes:
            raise LeaseUnavailableError(f"/dev/vfio/{group} can't be opened: No such file or directory")
        with self._kernel.lease(group):
            yield

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        return self._kernel.lease_devices(names)

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        return iter([found for found in self._kernel.open_files(mapped=mapped) if self._sees_host or found.pid == 1])

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        return self._kernel.on_uevent(wake)

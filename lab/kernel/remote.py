"""The guest's kernel as a `Kernel`: the guest makes each call by gpuvirt's code for real kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.paths import HostPath
from lab.kernel.channel import Channel


class GuestKernel:
    """The kernel of the guest at the other end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def pids(self) -> frozenset[int]:
        """The process id of the agent in the guest."""
        return frozenset(int(pid) for pid in self._channel.texts("pids"))

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first `limit` bytes of a file."""
        return self._channel.text("read", path, limit).encode("latin-1")

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file in one system call. A write that blocks also blocks the agent, and the guest is lost."""
        self._channel.call("write", path, data.decode("latin-1"))

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder."""
        return self._channel.texts("listdir", path)

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        return self._channel.text("readlink", path)

    def device_number(self, path: HostPath, /) -> int:
        """Return the device number of a node."""
        return self._channel.number("device_number", path)

    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        """Make the agent hold a VFIO group open."""
        with self._released(self._channel.number("lease", group)):
            yield

    @contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        """Make the agent hold VFIO devices open."""
        with self._released(self._channel.number("lease_devices", *names)):
            yield

    @contextmanager
    def _released(self, lease: int) -> Iterator[None]:
        try:
            yield
        finally:
            self._channel.call("release", lease)

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the nodes under `/dev` that processes have open, or have `mapped` as well."""
        for line in self._channel.texts("open_files", int(mapped)):
            pid, device, path = line.split(" ", 2)
            yield OpenFile(int(pid), HostPath(path), int(device))

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake` when a device appears, disappears or changes its driver."""
        self._channel.wakers.append(wake)
        return lambda: self._channel.wakers.remove(wake)

"""The kernel seam: files, leases, open files and uevents, of this host or of a simulated host.

All reads and writes of a host pass through a `Kernel`, at the level of files. The implementation for a real host is
here; `gpuvirt_sim.kernel` has one for simulated hosts, with the same behaviour.

Source of uevents: lib/kobject_uevent.c: `action@devpath`, then NUL-separated `KEY=value`. Since Linux 4.18 the kernel
sends uevents to every network namespace of the initial user namespace, so a pod without the host network receives them
too.
"""

import contextlib
import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from typing_extensions import override

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access import cdevkeeper, devicelease
from gpuvirt.hardware.access.openfiles import OpenFile, read_open_files
from gpuvirt.paths import HostPath, HostRoots

log = logging.getLogger(__name__)
ATTRIBUTE_BYTES = 4096
"""A sysfs attribute holds at most a page (Documentation/filesystems/sysfs.rst)."""
NETLINK_KOBJECT_UEVENT = 15
KERNEL_MULTICAST_GROUP = 1
"""include/uapi/linux/netlink.h; the kernel sends to group 1, udev to group 2."""

SUBSYSTEMS = frozenset({"pci", "vfio", "vfio-dev", "mdev", "mdev_bus", "iommu", "egm", "drivers", "module", "misc"})
"""Subsystems whose events can change the devices that a node offers; those of network and block cannot."""


def parse(message: bytes) -> Mapping[str, str]:
    """Return the variables of a kernel uevent, empty for other messages (those of udev begin with `libudev`)."""
    head, *fields = message.split(b"\0")
    if b"@" not in head:
        return {}
    pairs = (field.decode("utf-8", "replace").partition("=") for field in fields if b"=" in field)
    return {key: value for key, _, value in pairs}


def concerns_devices(message: bytes) -> bool:
    """Return whether a message is a kernel uevent that can change the devices that a node offers."""
    return parse(message).get("SUBSYSTEM", "") in SUBSYSTEMS


class Kernel(Protocol):
    """A host's kernel, as files. Every call raises OSError with the kernel's errno."""

    @property
    def pids(self) -> frozenset[int]:
        """The pids of the processes that have leases, as in `open_files`."""
        ...

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first `limit` bytes of a file."""
        ...

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file in one system call, as sysfs attributes require."""
        ...

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder, unsorted."""
        ...

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        ...

    def device_number(self, path: HostPath, /) -> int:
        """Return the device number of a node, 0 for any other file."""
        ...

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        """Hold a VFIO group open, so that no other process can open it.

        One system call tests and takes the group: a group can be open once only (kernel 6.1: a second open fails with
        EBUSY). Raises DeviceBusyError when another process has it open, LeaseUnavailableError when that is unknown.
        """
        ...

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        """Hold all VFIO devices of a group (`vfio0`), for a step that unbinds or removes them.

        It replaces `lease` where groups have no nodes (VFIO_GROUP=n), and also resets each device as for a VM. A device
        that the kernel unregisters during the lease is closed. Native drivers cannot bind a device of the group before
        all devices are closed. Raises DeviceBusyError when a device is in use, LeaseUnavailableError when that is
        unknown, for example because a member of the group has a native driver.
        """
        ...

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the device nodes and the VFIO devices that processes have open, or have `mapped` as well.

        Raises OSError where the open files of a process may not be read.
        """
        ...

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake`, from any thread, when a device is added, removed or changes its driver; return a function that
        ends these calls."""
        ...


class _OpenGroup(AbstractContextManager[None]):
    """A VFIO group that is open within the context; no generator, since each allocation opens several groups."""

    __slots__ = ("_fd", "_local", "_node")

    def __init__(self, node: HostPath, local: str) -> None:
        self._node, self._local = node, local
        self._fd = -1

    @override
    def __enter__(self) -> None:
        try:
            self._fd = os.open(self._local, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise lease_failed(self._node, error) from error

    @override
    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def lease_failed(node: HostPath, error: OSError) -> DeviceBusyError | LeaseUnavailableError:
    """Return the error for a group's node that could not be opened."""
    if error.errno == errno.EBUSY:
        return DeviceBusyError(f"{node} is open in another process")
    return LeaseUnavailableError(f"{node} can't be opened: {error.strerror}")


class RealKernel:
    """The kernel of the host whose folders are mounted at `roots`."""

    def __init__(self, roots: HostRoots) -> None:
        self._prefixes = roots.prefixes()
        self._root = "" if str(roots.root) == "/" else str(roots.root)
        self._elsewhere = tuple(f"/{name}" for name, place in self._prefixes.items() if place != f"{self._root}/{name}")
        """The beginnings of paths that this process does not see below the host's root."""
        self._places = devicelease.Places(*(self._prefixes[name] for name in ("dev", "sys", "proc")))
        self._keepers: set[int] = set()
        """The processes that hold VFIO devices."""

    @property
    def pids(self) -> frozenset[int]:
        """This process, and the processes that hold VFIO devices for it."""
        return frozenset({int(cdevkeeper.pid_in(self._places.proc)), *self._keepers})

    def _local(self, path: HostPath) -> str:
        if not path.startswith(self._elsewhere):
            return self._root + path
        first, slash, rest = path[1:].partition("/")
        return self._prefixes.get(first, f"{self._root}/{first}") + slash + rest

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first `limit` bytes of a file."""
        fd = os.open(self._local(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = part = os.read(fd, limit)
            # One read returns a whole attribute, but only a page of files like /proc/modules.
            while limit > ATTRIBUTE_BYTES and part and len(content) < limit:
                part = os.read(fd, limit - len(content))
                content += part
        except OSError as error:
            error.filename = path  # an error of a descriptor has no path, which the messages need
            raise
        else:
            return content
        finally:
            os.close(fd)

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file in one system call."""
        fd = os.open(self._local(path), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, data)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(fd)

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder."""
        return os.listdir(self._local(path))  # noqa: PTH208  a thousand folders a scan: no Path objects

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        return os.readlink(self._local(path))  # noqa: PTH115  a thousand links a scan: no Path objects

    def device_number(self, path: HostPath, /) -> int:
        """Return the device number of a node."""
        return os.stat(self._local(path)).st_rdev  # noqa: PTH116

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        """Hold a VFIO group open."""
        node = HostPath(f"/dev/vfio/{group}")
        return _OpenGroup(node, self._local(node))

    @contextlib.contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        """Hold all VFIO devices of a group."""
        with devicelease.leased(names, self._places, self._needed()) as keeper:
            self._keepers.add(keeper)
            try:
                yield
            finally:
                self._keepers.discard(keeper)

    def _needed(self) -> int | None:
        """Return the read end of a pipe whose end of file ends the leases; None: they end with this process."""
        return None

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the device nodes and the VFIO devices that processes have open, or have `mapped` as well."""
        return read_open_files(self._local(HostPath("/proc")), mapped=mapped)

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake` when devices come, go or change driver."""
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT)
        channel.bind((0, KERNEL_MULTICAST_GROUP))
        stopping, stopped = socket.socketpair()

        def listen() -> None:
            with channel, stopped:
                while stopped not in select.select([channel, stopped], [], [])[0]:
                    try:
                        relevant = concerns_devices(channel.recv(16384))
                    except OSError as error:  # unknown: ENOBUFS: messages were lost, so the host must be scanned
                        relevant = True
                        log.warning("uevents were lost", extra={"errno": error.errno})
                    if relevant:
                        wake()

        threading.Thread(target=listen, name="uevents", daemon=True).start()
        return stopping.close

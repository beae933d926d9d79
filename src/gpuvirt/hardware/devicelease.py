"""The lease of VFIO devices by their own nodes: each is bound to an iommufd of ours until the kernel takes it back.

It is for kernels without nodes of groups (VFIO_GROUP=n). Measured on 6.12 (lab/kernel/README.md): a node opens many
times, but binds once. A device that is open keeps its driver from letting go, so whoever leases it must close it when
the kernel starts to take it away; by then nobody can open it any more. That is what the process `cdevkeeper` is for.
"""

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.hardware import cdevkeeper

IOMMUFD = "/dev/iommu"
CDEVS = "/dev/vfio/devices"
PRESENT = "/sys/class/vfio-dev"
"""The devices that can be opened; one leaves here before the kernel waits for its users (vfio_unregister_group_dev)."""

BIND_IOMMUFD = (ord(";") << 8) + 118
"""include/uapi/linux/vfio.h: `struct vfio_device_bind_iommufd` of argsz, flags, iommufd, out_devid."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where this process sees the host's folders."""

    dev: str
    sys: str
    proc: str


@contextlib.contextmanager
def leased(names: Sequence[str], places: Places, needed: int | None) -> Iterator[int]:
    """Hold devices (`vfio0`), which must be all VFIO devices of their group, so that nobody else can use one.

    They are held by another process, whose number in the host's `/proc` the context gives; `needed` is a pipe's end
    that tells it by its end of file that nobody needs them any more, None: this process alone needs them. Raises
    DeviceBusyError when one is in use elsewhere, LeaseUnavailableError when that can't be told.
    """
    with contextlib.ExitStack() as closing:
        if needed is None:
            needed, alive = os.pipe()
            closing.callback(os.close, needed)
            closing.callback(os.close, alive)
        keeper, number = _kept(names, places, needed)
        try:
            yield number
        finally:
            keeper.kill()
            keeper.wait()


def _kept(names: Sequence[str], places: Places, needed: int) -> tuple["subprocess.Popen[bytes]", int]:
    """Open and bind devices, and return the process that has them open from then on."""
    with contextlib.ExitStack() as closing:
        held: dict[str, int] = {}
        iommufd = _opened(IOMMUFD, places)
        closing.callback(os.close, iommufd)
        for name in names:
            held[name] = _opened(f"{CDEVS}/{name}", places)
            closing.callback(os.close, held[name])
            _bind(name, held[name], iommufd)
            if not _is_present(f"{places.sys}/class/vfio-dev/{name}"):
                raise LeaseUnavailableError(f"{CDEVS}/{name} is not in {PRESENT}: it is just being taken away")
        ours, theirs = os.pipe()
        closing.callback(os.close, ours)
        with open(theirs, "wb") as said_here:  # noqa: PTH123  a pipe
            keeper = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", cdevkeeper.__file__),
                    *(places.proc, f"{places.sys}/class/vfio-dev"),
                    *(f"{name}={fd}" for name, fd in held.items()),
                ],
                stdin=needed,
                stdout=said_here,
                stderr=subprocess.DEVNULL,
                pass_fds=(iommufd, *held.values()),
                start_new_session=True,
            )
        said = os.read(ours, 32)
        if not said.isdigit():
            keeper.kill()
            keeper.wait()
            raise LeaseUnavailableError(f"{', '.join(names)} can't be held: the process for it ended at once")
        return keeper, int(said)


def _opened(node: str, places: Places) -> int:
    try:
        return os.open(places.dev + node.removeprefix("/dev"), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LeaseUnavailableError(f"{node} can't be opened: {error.strerror}") from error


def _bind(name: str, fd: int, iommufd: int) -> None:
    try:
        fcntl.ioctl(fd, BIND_IOMMUFD, struct.pack("IIiI", 16, 0, iommufd, 0))
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EBUSY}:  # bound elsewhere; its group is open elsewhere
            raise DeviceBusyError(f"{CDEVS}/{name} is in use by another process") from error
        # EPERM: its neighbour is bound elsewhere, or has a native driver. ENOTTY: no such node after all.
        raise LeaseUnavailableError(f"{CDEVS}/{name} can't be bound to an iommufd: {error.strerror}") from error


def _is_present(link: str) -> bool:
    return Path(link).is_symlink()

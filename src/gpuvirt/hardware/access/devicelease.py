"""The lease of VFIO devices by their own nodes: each device is bound to our iommufd until the kernel unregisters it.

It is for kernels without group nodes (VFIO_GROUP=n). Measured on 6.12 (lab/kernel/README.md): a node can
be opened many times, but bound only once. The kernel cannot unbind a device from its driver while the device is open.
So the process `cdevkeeper` closes it when the kernel starts to unregister it; from then on no process can open the
device.
"""

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.sysfs import IOMMUFD, VFIO_DEVICES
from gpuvirt.hardware.access import cdevkeeper

CDEVS = "/dev/vfio/devices"
"""The devices that can be opened; the kernel removes one here before it waits for its users
(vfio_unregister_group_dev)."""

BIND_IOMMUFD = (ord(";") << 8) + 118
"""include/uapi/linux/vfio.h: `struct vfio_device_bind_iommufd` has argsz, flags, iommufd, out_devid."""


class Places(msgspec.Struct, frozen=True):
    """The paths of the host's folders in this process."""

    dev: str
    sys: str
    proc: str


@contextlib.contextmanager
def leased(names: Sequence[str], places: Places, needed: int | None) -> Iterator[int]:
    """Hold devices (`vfio0`), which must be all VFIO devices of their group, so that no other process can use them.

    A keeper process holds them; the context value is its pid in the host's `/proc`. It ends the lease at the end of
    file of the pipe `needed`; None: when this process ends. Raises DeviceBusyError when another process uses a device,
    LeaseUnavailableError when that is unknown.
    """
    with contextlib.ExitStack() as closing:
        if needed is None:
            needed, alive = os.pipe()
            closing.callback(os.close, needed)
            closing.callback(os.close, alive)
        keeper, pid = _start_keeper(names, places, needed)
        try:
            yield pid
        finally:
            keeper.kill()
            keeper.wait()


def _start_keeper(names: Sequence[str], places: Places, needed: int) -> tuple["subprocess.Popen[bytes]", int]:
    """Open and bind devices, and return the process that holds them open from then on, with its pid."""
    with contextlib.ExitStack() as closing:
        held: dict[str, int] = {}
        iommufd = _opened(IOMMUFD, places)
        closing.callback(os.close, iommufd)
        for name in names:
            held[name] = _opened(f"{CDEVS}/{name}", places)
            closing.callback(os.close, held[name])
            _bind(name, held[name], iommufd)
            if not _is_present(f"{places.sys}/class/vfio-dev/{name}"):
                raise LeaseUnavailableError(
                    f"{CDEVS}/{name} is not in {VFIO_DEVICES}: the kernel is removing the device"
                )
        ours, theirs = os.pipe()
        closing.callback(os.close, ours)
        with open(theirs, "wb") as answer_end:  # noqa: PTH123  a pipe
            keeper = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", cdevkeeper.__file__),
                    *(places.proc, f"{places.sys}/class/vfio-dev"),
                    *(f"{name}={fd}" for name, fd in held.items()),
                ],
                stdin=needed,
                stdout=answer_end,
                stderr=subprocess.DEVNULL,
                pass_fds=(iommufd, *held.values()),
                start_new_session=True,
            )
        pid = os.read(ours, 32)
        if not pid.isdigit():
            keeper.kill()
            keeper.wait()
            raise LeaseUnavailableError(f"{', '.join(names)} can't be leased: the keeper process ended at once")
        return keeper, int(pid)


def _opened(node: str, places: Places) -> int:
    try:
        return os.open(places.dev + node.removeprefix("/dev"), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LeaseUnavailableError(f"{node} can't be opened: {error.strerror}") from error


def _bind(name: str, fd: int, iommufd: int) -> None:
    try:
        fcntl.ioctl(fd, BIND_IOMMUFD, struct.pack("IIiI", 16, 0, iommufd, 0))
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EBUSY}:  # another process has bound the device, or opened its group
            raise DeviceBusyError(f"{CDEVS}/{name} is in use by another process") from error
        # EPERM: another process has bound a member of the group, or a member has a native driver. ENOTTY: not a cdev.
        raise LeaseUnavailableError(f"{CDEVS}/{name} can't be bound to an iommufd: {error.strerror}") from error


def _is_present(link: str) -> bool:
    return Path(link).is_symlink()  # unknown: no lease is taken

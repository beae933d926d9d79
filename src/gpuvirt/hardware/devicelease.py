"""The lease of VFIO devices by their own nodes: each is bound to an iommufd of ours until the kernel takes it back.

It is for kernels without nodes of groups (VFIO_GROUP=n). Measured on 6.12 (lab/kernel/README.md): a node opens many
times, but binds once. A device that is open keeps its driver from letting go, so whoever leases it must close it when
the kernel starts to take it away; by then nobody can open it any more. That is what the thread here is for.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError

IOMMUFD = "/dev/iommu"
CDEVS = "/dev/vfio/devices"
PRESENT = "/sys/class/vfio-dev"
"""The devices that can be opened; one leaves here before the kernel waits for its users (vfio_unregister_group_dev)."""

BIND_IOMMUFD = (ord(";") << 8) + 118
"""include/uapi/linux/vfio.h: `struct vfio_device_bind_iommufd` of argsz, flags, iommufd, out_devid."""

POLL_S = 0.01
"""How soon a device that the kernel wants is let go; a lease lasts for moments."""


@contextlib.contextmanager
def leased(names: Sequence[str], open_node: Callable[[str], int], is_present: Callable[[str], bool]) -> Iterator[None]:
    """Hold devices (`vfio0`), which must be all VFIO devices of their group, so that nobody else can use one.

    Raises DeviceBusyError when one is in use elsewhere, LeaseUnavailableError when that can't be told.
    """
    held: dict[str, int] = {}
    ended = threading.Event()
    watcher = threading.Thread(target=_let_go_when_asked, args=(held, is_present, ended), name="lease", daemon=True)
    with contextlib.ExitStack() as closing:
        iommufd = _opened(IOMMUFD, open_node)
        closing.callback(os.close, iommufd)
        closing.callback(_close_all, held)
        for name in names:
            held[name] = _opened(f"{CDEVS}/{name}", open_node)
            _bind(name, held[name], iommufd)
            if not is_present(name):
                raise LeaseUnavailableError(f"{CDEVS}/{name} is not in {PRESENT}: it is just being taken away")
        watcher.start()
        closing.callback(watcher.join)
        closing.callback(ended.set)
        yield


def _opened(node: str, open_node: Callable[[str], int]) -> int:
    try:
        return open_node(node)
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


def _let_go_when_asked(held: dict[str, int], is_present: Callable[[str], bool], ended: threading.Event) -> None:
    while held and not ended.wait(POLL_S):
        for name in [name for name in held if not is_present(name)]:
            os.close(held.pop(name))


def _close_all(held: dict[str, int]) -> None:
    for name in list(held):
        os.close(held.pop(name))

"""Processes that have a VFIO group or VFIO devices open, as a VM has (include/uapi/linux/vfio.h)."""

import contextlib
import fcntl
import os
import select
import struct
from collections.abc import Sequence
from pathlib import Path

from gpuvirt.facts.pci import VFIO_DRIVERS

BASE = (ord(";") << 8) + 100
SET_IOMMU = BASE + 2
GROUP_SET_CONTAINER = BASE + 4
GROUP_GET_DEVICE_FD = BASE + 6
DEVICE_GET_INFO = BASE + 7
DEVICE_SET_IRQS = BASE + 10
DEVICE_BIND_IOMMUFD = BASE + 18
TYPE1_IOMMU = 1
REQUEST_IRQ = 4
DATA_EVENTFD, ACTION_TRIGGER = 1 << 2, 1 << 5


class VfioUser:
    """Has files open, and receives the kernel's requests to release a device."""

    def __init__(self) -> None:
        self._fds = contextlib.ExitStack()
        self._requests: list[int] = []

    def asked_back(self, within_s: float) -> bool:
        """Return whether the kernel asks for a device back within this time."""
        return bool(select.select(self._requests, [], [], within_s)[0])

    def end(self) -> None:
        """Close all files."""
        self._fds.close()

    def keep(self, fd: int) -> int:
        """Keep a file open until `end`."""
        self._fds.callback(os.close, fd)
        return fd

    def open(self, path: str) -> int:
        """Open a node."""
        return self.keep(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def listen(self, device_fd: int) -> None:
        """Register for the kernel's request to release a device; ignore a driver that has none (mtty 6.12: ENOTTY)."""
        # mdevs must get this call before the others
        fcntl.ioctl(device_fd, DEVICE_GET_INFO, struct.pack("IIII", 16, 0, 0, 0))
        event = self.keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        header = struct.pack("IIIIIi", 24, DATA_EVENTFD | ACTION_TRIGGER, REQUEST_IRQ, 0, 1, event)
        with contextlib.suppress(OSError):
            fcntl.ioctl(device_fd, DEVICE_SET_IRQS, header)
        self._requests.append(event)


def use_group(group: int, *, devices: bool) -> VfioUser:
    """Put a group into a container, and open its devices if `devices`. Raises OSError as the kernel does."""
    with contextlib.ExitStack() as opening:
        user = VfioUser()
        opening.callback(user.end)
        group_fd, container = user.open(f"/dev/vfio/{group}"), user.open("/dev/vfio/vfio")
        fcntl.ioctl(group_fd, GROUP_SET_CONTAINER, struct.pack("i", container))
        fcntl.ioctl(container, SET_IOMMU, TYPE1_IOMMU)
        for device in _devices(group) if devices else ():
            # The kernel returns the new file descriptor; ioctl needs a mutable buffer for that.
            name = bytearray(device.encode() + b"\0")
            user.listen(user.keep(fcntl.ioctl(group_fd, GROUP_GET_DEVICE_FD, name)))
        opening.pop_all()
    return user


def use_devices(devices: Sequence[str], *, bind: bool) -> VfioUser:
    """Open devices by their own nodes, and bind them to an iommufd if `bind`. Raises OSError."""
    with contextlib.ExitStack() as opening:
        user = VfioUser()
        opening.callback(user.end)
        iommufd = user.open("/dev/iommu")
        for device in devices:
            fd = user.open(f"/dev/vfio/devices/{_cdev(device)}")
            if bind:
                fcntl.ioctl(fd, DEVICE_BIND_IOMMUFD, struct.pack("IIiI", 16, 0, iommufd, 0))
                user.listen(fd)
        opening.pop_all()
    return user


def _cdev(device: str) -> str:
    """Return the name of a device's own node."""
    bus = "pci" if device[4:5] == ":" else "mdev"
    return next(Path(f"/sys/bus/{bus}/devices/{device}/vfio-dev").iterdir()).name


def _devices(group: int) -> list[str]:
    """Return the members of a group that are VFIO devices; mdevs, which are no PCI functions, always are."""
    members = Path(f"/sys/kernel/iommu_groups/{group}/devices")
    return [
        member.name
        for member in sorted(members.iterdir())
        if ":" not in member.name or (member / "driver").resolve().name in VFIO_DRIVERS
    ]

"""A process that has a VFIO group open, as a virtual machine has (include/uapi/linux/vfio.h)."""

import contextlib
import fcntl
import os
import select
import struct
from pathlib import Path

from gpuvirt.facts.pci import VFIO_DRIVERS

BASE = (ord(";") << 8) + 100
SET_IOMMU = BASE + 2
GROUP_SET_CONTAINER = BASE + 4
GROUP_GET_DEVICE_FD = BASE + 6
DEVICE_GET_INFO = BASE + 7
DEVICE_SET_IRQS = BASE + 10
TYPE1_IOMMU = 1
REQUEST_IRQ = 4
DATA_EVENTFD, ACTION_TRIGGER = 1 << 2, 1 << 5


class VfioUser:
    """Has a group in a container, and its devices open unless told not to. Raises OSError as the kernel does."""

    def __init__(self, group: int, *, devices: bool) -> None:
        self._fds = contextlib.ExitStack()
        self._requests: list[int] = []
        with contextlib.ExitStack() as opening:
            opening.enter_context(self._fds)
            group_fd = self._keep(os.open(f"/dev/vfio/{group}", os.O_RDWR | os.O_CLOEXEC))
            container = self._keep(os.open("/dev/vfio/vfio", os.O_RDWR | os.O_CLOEXEC))
            fcntl.ioctl(group_fd, GROUP_SET_CONTAINER, struct.pack("i", container))
            fcntl.ioctl(container, SET_IOMMU, TYPE1_IOMMU)
            for device in _devices(group) if devices else ():
                self._open_device(group_fd, device)
            opening.pop_all()

    def asked_back(self, within_s: float) -> bool:
        """Return whether the kernel asks for a device back, at once or in time."""
        return bool(select.select(self._requests, [], [], within_s)[0])

    def end(self) -> None:
        """Let go of everything."""
        self._fds.close()

    def _open_device(self, group_fd: int, device: str) -> None:
        # The kernel returns the new descriptor, for which ioctl needs a buffer that it may change.
        fd = self._keep(fcntl.ioctl(group_fd, GROUP_GET_DEVICE_FD, bytearray(device.encode() + b"\0")))
        fcntl.ioctl(fd, DEVICE_GET_INFO, struct.pack("IIII", 16, 0, 0, 0))  # mdevs must have been asked before the rest
        event = self._keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        header = struct.pack("IIIIIi", 24, DATA_EVENTFD | ACTION_TRIGGER, REQUEST_IRQ, 0, 1, event)
        fcntl.ioctl(fd, DEVICE_SET_IRQS, header)
        self._requests.append(event)

    def _keep(self, fd: int) -> int:
        self._fds.callback(os.close, fd)
        return fd


def _devices(group: int) -> list[str]:
    """Return the members of a group that VFIO has; mdevs are no PCI functions, and have it from the start."""
    members = Path(f"/sys/kernel/iommu_groups/{group}/devices")
    return [
        member.name
        for member in sorted(members.iterdir())
        if ":" not in member.name or (member / "driver").resolve().name in VFIO_DRIVERS
    ]

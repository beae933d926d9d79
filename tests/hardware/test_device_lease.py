"""A lease of VFIO devices by their own nodes is refused wherever it is unknown whether another process uses them."""

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt.errors import DeviceBusyError, GpuvirtError, LeaseUnavailableError
from gpuvirt.hardware.access.devicelease import Places, leased


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return the folders of a host with one VFIO device whose node is a file."""
    for folder in ("dev/vfio/devices", "sys/class/vfio-dev", "proc"):
        (tmp_path / folder).mkdir(parents=True)
    for node in ("dev/iommu", "dev/vfio/devices/vfio0"):
        (tmp_path / node).touch()
    (tmp_path / "sys/class/vfio-dev/vfio0").symlink_to("../../devices/vfio0")
    return Places(*(str(tmp_path / name) for name in ("dev", "sys", "proc")))


def answering(number: int) -> Callable[[int, int, bytes], int]:
    """Return an ioctl that fails with an errno, or succeeds with 0."""

    def ioctl(fd: int, request: int, argument: bytes) -> int:
        del fd, request, argument
        if number:
            raise OSError(number, os.strerror(number))
        return 0

    return ioctl


@pytest.mark.parametrize(
    ("number", "lacks", "executable", "error", "text"),
    [
        (errno.EBUSY, "", "", DeviceBusyError, "in use by another process"),
        (errno.EINVAL, "", "", DeviceBusyError, "in use by another process"),
        (errno.EPERM, "", "", LeaseUnavailableError, "can't be bound to an iommufd: Operation not permitted"),
        (0, "dev/vfio/devices/vfio0", "", LeaseUnavailableError, "vfio0 can't be opened: No such file"),
        (0, "sys/class/vfio-dev/vfio0", "", LeaseUnavailableError, "the kernel is removing the device"),
        (0, "", "/bin/false", LeaseUnavailableError, "the keeper process ended at once"),
    ],
    ids=["EBUSY", "EINVAL", "EPERM", "no node", "unregistered", "no keeper"],
)
def test_a_device_is_not_leased(
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    lacks: str,
    executable: str,
    error: type[GpuvirtError],
    text: str,
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", answering(number))
    monkeypatch.setattr(sys, "executable", executable or sys.executable)
    if lacks:
        (tmp_path / lacks).unlink()
    with pytest.raises(error, match=text), leased(["vfio0"], places, None):
        raise AssertionError("leased")


def test_a_bound_device_is_leased(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", answering(0))
    with leased(["vfio0"], places, None) as pid:
        assert f"{places.dev}/vfio/devices/vfio0" in {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}

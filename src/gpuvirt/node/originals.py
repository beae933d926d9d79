"""Which driver each function had before it was first given to a virtual machine, on disk: it is to get it back."""

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.node.files import replace_file
from gpuvirt.paths import HostPath

FILE = HostPath("/var/lib/gpuvirt/drivers.json")


class _Content(msgspec.Struct, frozen=True):
    version: int
    drivers: dict[str, str]


VERSION = 1


def read(path: Path) -> Mapping[PciAddress, str]:
    """Return what is recorded; nothing where there is no file, or a damaged one: the kernel then finds the driver."""
    try:
        return parse(path.read_bytes())
    except (OSError, DamagedError):
        return {}


def parse(content: bytes) -> Mapping[PciAddress, str]:
    """Return what a record says; raise DamagedError for what is none."""
    return {PciAddress(address): driver for address, driver in from_json(content, _Content).drivers.items()}


def write(path: Path, drivers: Mapping[PciAddress, str]) -> None:
    """Record all drivers, so that it survives a power cut."""
    content = _Content(VERSION, {str(address): driver for address, driver in sorted(drivers.items())})
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def update(path: Path, change: Callable[[Mapping[PciAddress, str]], Mapping[PciAddress, str]]) -> None:
    """Record what `change` makes of what is recorded; units are moved side by side, and each adds to the one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        before = read(path)
        after = change(before)
        if after != before:
            write(path, after)
    finally:
        os.close(fd)

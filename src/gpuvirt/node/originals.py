"""The driver journal on disk: which driver each function had, and what is being done to it, recorded before it is done.

Version 1 had only `drivers`. Its `overrides` are those of all functions in it: it recorded a driver to write one.
"""

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError, InvalidIdError
from gpuvirt.facts.ids import BootId, PciAddress, parse_pci_address
from gpuvirt.model.driverjournal import DriverJournal, StartedChange
from gpuvirt.node.files import replace_file
from gpuvirt.paths import HostPath

FILE = HostPath("/var/lib/gpuvirt/drivers.json")
USUAL_OVERRIDE = "vfio-pci"
"""What a version without `overrides` wrote for the functions that it recorded."""


class _Change(msgspec.Struct, frozen=True):
    to_vfio: bool
    driver: str | None = None


class _Content(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    drivers: dict[str, str]
    overrides: dict[str, str] | None = None
    changes: dict[str, _Change] = {}
    boot: str | None = None
    damaged: bool = False


VERSION = 1
"""It stays 1: a version without the other fields reads `drivers`, and that is all that it needs."""


def read(path: Path) -> DriverJournal:
    """Return what is recorded; where there is no file nothing is, and of a damaged one it is unknown what was."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return DriverJournal()
    except (OSError, DamagedError):
        return DriverJournal(damaged=True)


def parse(content: bytes) -> DriverJournal:
    """Return what a record says; raise DamagedError for what is none."""
    found = from_json(content, _Content)
    try:
        drivers = _by_address(found.drivers)
        overrides = dict.fromkeys(drivers, USUAL_OVERRIDE) if found.overrides is None else _by_address(found.overrides)
        changes = {
            parse_pci_address(one): StartedChange(change.to_vfio, change.driver)
            for one, change in found.changes.items()
        }
    except InvalidIdError as error:
        raise DamagedError(str(error)) from error
    return DriverJournal(drivers, overrides, changes, BootId(found.boot) if found.boot else None, found.damaged)


def _by_address(texts: Mapping[str, str]) -> dict[PciAddress, str]:
    return {parse_pci_address(address): driver for address, driver in texts.items()}


def write(path: Path, journal: DriverJournal) -> None:
    """Record all of it, so that it survives a power cut."""
    content = _Content(
        VERSION,
        dict(sorted(journal.drivers.items())),
        dict(sorted(journal.overrides.items())),
        {one: _Change(change.to_vfio, change.driver) for one, change in sorted(journal.changes.items())},
        journal.boot_id,
        journal.damaged,
    )
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def update(path: Path, change: Callable[[DriverJournal], DriverJournal]) -> None:
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

"""The driver journal on disk: the original driver of each function, and driver changes before they are made.

Version 1 had no digest, and at first only `drivers`, which it recorded before it wrote an override. Its readers also
read later versions.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gpuvirt.agent.store.checksummed import DigestField, Fields
from gpuvirt.agent.store.persisted import Persisted
from gpuvirt.agent.store.stateformat import Format
from gpuvirt.facts.ids import BootId, PciAddress, parse_pci_address
from gpuvirt.model.change.driverjournal import DriverJournal, StartedChange
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems
from gpuvirt.paths import HostPath

FILE = HostPath("/var/lib/gpuvirt/drivers.json")
USUAL_OVERRIDE = "vfio-pci"
"""The override that versions without `overrides` wrote for all recorded functions."""


class _Change(msgspec.Struct, frozen=True):
    to_vfio: bool
    driver: str | None = None


class _Content(msgspec.Struct, frozen=True):
    drivers: dict[str, str]
    overrides: dict[str, str] = {}
    changes: dict[str, _Change] = {}
    boot: str | None = None
    damaged: bool = False

    def __post_init__(self) -> None:
        for address in (*self.drivers, *self.overrides, *self.changes):
            parse_pci_address(address)


def _with_overrides(fields: Fields) -> Fields:
    """Return the fields of version 2."""
    drivers = fields.get("drivers")
    if fields.get("overrides") is not None or not isinstance(drivers, dict):
        return fields
    return {**fields, "overrides": dict.fromkeys(drivers, USUAL_OVERRIDE)}


FORMAT = Format(_Content, DigestField(), upgrades=(_with_overrides,))


def read(path: Path) -> DriverJournal:
    """Return the driver journal: an empty one if there is no file, a damaged one if the file can't be used."""
    return _journal(_file(path).read().stored.value)


def parse(content: bytes) -> DriverJournal:
    """Return the driver journal in the content of a file; raise DamagedError."""
    return _journal(FORMAT.decode(content).value)


def update(path: Path, change: Callable[[DriverJournal], DriverJournal]) -> None:
    """Change the driver journal. Changes of several isolation units update the one file in turn."""
    _file(path).update(lambda content: _content(change(_journal(content))))


def lost(path: Path) -> Reason:
    """Return the reason that is reported while the driver journal is damaged."""
    return nodeproblems.lost(
        ReasonCode.DRIVERS_LOST,
        path,
        "was damaged or can't be read; the drivers and overrides that it recorded are unknown",
        "GPUs return to the driver that modules.alias names; the next boot clears all overrides",
        Seen("", f"a damaged file is kept beside it, as {path.name}.damaged"),
    )


def _file(path: Path) -> Persisted[_Content]:
    return Persisted(path, FORMAT, _Content({}), lost=_Content({}, damaged=True))


def _journal(content: _Content) -> DriverJournal:
    return DriverJournal(
        _by_address(content.drivers),
        _by_address(content.overrides),
        {
            parse_pci_address(address): StartedChange(change.to_vfio, change.driver)
            for address, change in content.changes.items()
        },
        BootId(content.boot) if content.boot else None,
        content.damaged,
    )


def _by_address(texts: Mapping[str, str]) -> dict[PciAddress, str]:
    return {parse_pci_address(address): driver for address, driver in texts.items()}


def _content(journal: DriverJournal) -> _Content:
    return _Content(
        dict(sorted(journal.drivers.items())),
        dict(sorted(journal.overrides.items())),
        {address: _Change(change.to_vfio, change.driver) for address, change in sorted(journal.changes.items())},
        journal.boot_id,
        journal.damaged,
    )

"""The driver journal: gpuvirt records each change of a driver in it before the change, and reads it after a crash."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, PciAddress, parse_pci_address


class StartedChange(msgspec.Struct, frozen=True):
    """A change of one function's driver that was started and whose end is not recorded."""

    to_vfio: bool
    """Whether the change binds the function to a VFIO driver; else it binds the function to its native driver."""
    driver: str | None = None
    """The driver that the function had when the change started."""


class DriverJournal(msgspec.Struct, frozen=True, rename={"boot_id": "boot"}):
    """The records of all functions of a host, as they are kept on disk; raise InvalidIdError."""

    drivers: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The native drivers that functions had before gpuvirt bound them to a VFIO driver. They outlive a reboot."""
    overrides: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The values that gpuvirt has written into `driver_override` in this boot and not cleared."""
    changes: Mapping[PciAddress, StartedChange] = msgspec.field(default_factory=dict)
    """The changes of this boot that have not ended: their process was killed, or still runs."""
    boot_id: BootId | None = None
    """The boot in which the overrides were written and the changes started."""
    damaged: bool = False
    """Whether the file was damaged in this boot, so that an override without a record may be gpuvirt's own."""

    def __post_init__(self) -> None:
        for address in (*self.drivers, *self.overrides, *self.changes):
            parse_pci_address(address)

    def of_boot(self, boot_id: BootId | None) -> "DriverJournal":
        """Return the records that hold in a boot: a reboot clears every override, and ends every change."""
        if boot_id is None or self.boot_id in {None, boot_id}:
            return self if boot_id is None else replace(self, boot_id=boot_id)
        return DriverJournal(drivers=self.drivers, boot_id=boot_id)

    @property
    def open(self) -> frozenset[PciAddress]:
        """The functions that have an override of gpuvirt's, or a change that has not ended."""
        return frozenset({*self.overrides, *self.changes})

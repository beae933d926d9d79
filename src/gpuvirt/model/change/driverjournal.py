"""What gpuvirt has recorded of functions whose drivers it changes: written before each change, read after a crash."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import BootId, PciAddress


@dataclass(frozen=True, slots=True)
class StartedChange:
    """A change of one function's driver that has been started, and not been seen to end."""

    to_vfio: bool
    """Whether the function is to get a VFIO driver; else its native one."""
    driver: str | None = None
    """The driver that it had when the change was started."""


@dataclass(frozen=True, slots=True)
class DriverJournal:
    """What is recorded of all functions of a host."""

    drivers: Mapping[PciAddress, str] = field(default_factory=dict)
    """The native drivers that functions had before gpuvirt gave them to a VFIO driver. They outlive a reboot."""
    overrides: Mapping[PciAddress, str] = field(default_factory=dict)
    """What gpuvirt has written into `driver_override` since the host was started, and not taken back."""
    changes: Mapping[PciAddress, StartedChange] = field(default_factory=dict)
    """The changes of this boot that have been started and not ended: their process was killed, or is still at it."""
    boot_id: BootId | None = None
    """The boot that overrides and changes are of."""
    damaged: bool = False
    """Whether the file was damaged in this boot: it is unknown then who wrote an override that is not recorded."""

    def of_boot(self, boot_id: BootId | None) -> "DriverJournal":
        """Return what still holds: a reboot clears every override, and ends every change."""
        if boot_id is None or self.boot_id in {None, boot_id}:
            return self if boot_id is None else replace(self, boot_id=boot_id)
        return DriverJournal(drivers=self.drivers, boot_id=boot_id)

    @property
    def open(self) -> frozenset[PciAddress]:
        """The functions of which something has not been taken back, or not been ended."""
        return frozenset({*self.overrides, *self.changes})

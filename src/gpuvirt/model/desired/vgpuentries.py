"""Entries of vGPU configs: the desired vGPUs of a node's GPUs, the GPUs that they select, and notes on them.

Source of device filters (`0x223610DE`, `0x25B610DE:0x157E10DE`): vgpu-device-manager. Each half is a number of 32 bits,
the device above the vendor, in Go's syntax for integers; without the second half, every subsystem matches.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciId
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.vgputypes.profiles import Profile

_INTEGER = re.compile(
    r"(?:0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<bin>(?:_?[01])+)|0[oO]?(?P<oct>(?:_?[0-7])+)"
    r"|(?P<dec>0|[1-9](?:_?[0-9])*))"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_MOST_CHARACTERS = 48


class DeviceFilter(msgspec.Struct, frozen=True):
    """A filter by the PCI ids that a GPU must have."""

    device: PciId
    subsystem: PciId | None = None

    @property
    def text(self) -> str:
        """The filter in the syntax of configs."""
        return ":".join(f"0x{ids.device:04X}{ids.vendor:04X}" for ids in (self.device, self.subsystem) if ids)

    def matches(self, device: PciId, subsystem: PciId | None) -> bool:
        """Return whether a GPU has these ids; an unreadable subsystem (None) matches no filter with a subsystem."""
        return self.device == device and self.subsystem in {None, subsystem}


def parse_filter(text: str) -> DeviceFilter:
    """Return a filter, or raise InvalidIdError."""
    halves = [_id(half) for half in text.split(":")]
    device, subsystem = halves[0], halves[1] if len(halves) > 1 else None
    if device is None or len(halves) > 2 or (len(halves) == 2 and subsystem is None):
        raise InvalidIdError(
            "a device filter",
            text,
            "0xDDDDVVVV or 0xDDDDVVVV:0xSSSSVVVV, device id and vendor id in one number, as in 0x223610DE",
        )
    return DeviceFilter(device, subsystem)


def _id(text: str) -> PciId | None:
    match = _INTEGER.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
    if not match or match.lastgroup is None:
        return None
    number = int(match[match.lastgroup].replace("_", ""), _BASES[match.lastgroup])
    return PciId(number & 0xFFFF, number >> 16) if number < 1 << 32 else None


class Sizes(StrEnum):
    """Whether a GPU may carry vGPUs of several framebuffer sizes at the same time."""

    EQUAL = "equal"
    MIXED = "mixed"


class NoteCode(StrEnum):
    """The kinds of notes on a valid config."""

    BAD_FILTER = "BadFilter"
    BAD_INDEX = "BadIndex"
    UNKNOWN_TYPE = "UnknownType"
    TOO_MANY = "TooMany"
    SIZES_DIFFER = "SizesDiffer"
    NO_SUCH_GPU = "NoSuchGpu"
    NOTHING_MATCHES = "NothingMatches"
    OTHER_BOARD = "OtherBoard"
    OTHER_CARD = "OtherCard"
    CARD_UNDECIDED = "CardUndecided"
    NEVER_MIXED = "NeverMixed"


class Note(msgspec.Struct, frozen=True):
    """A part of a config that may not do what its author expects."""

    code: NoteCode
    place: str
    """Where it is written: `config.yaml:7: $.vgpu-configs.mine[0]`."""
    message: str

    @property
    def text(self) -> str:
        """The note with its place."""
        return f"{self.place}: {self.message}"


class ConfigEntry(msgspec.Struct, frozen=True):
    """An entry of a named config."""

    types: Mapping[Profile, int]
    """How many vGPUs of each type are desired on each GPU; where it is empty, no vGPUs are desired."""
    indices: frozenset[int] | None = None
    """The GPUs by their index in order of PCI addresses; None for all."""
    filters: frozenset[DeviceFilter] | None = None
    """Filters, one of which must match; None matches all GPUs, an empty set (all were malformed) matches none."""
    scheduler: Scheduler | None = None
    """None keeps the GPU's scheduler."""
    sizes: Sizes | None = None
    """None keeps the GPU's mode of sizes."""
    place: str = ""
    """Where the entry is written."""

    @property
    def is_for_all(self) -> bool:
        """Return whether it selects all GPUs."""
        return self.indices is None and self.filters is None

    def picks_as(self, other: "ConfigEntry") -> bool:
        """Return whether it has the same `devices` and `device-filter` as another entry."""
        return (self.indices, self.filters) == (other.indices, other.filters)

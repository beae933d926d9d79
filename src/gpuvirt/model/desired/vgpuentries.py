"""Entries of vGPU configs: the desired vGPUs of a node's GPUs, and notes on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.devicefilter import DeviceFilter
from gpuvirt.model.vgputypes.profiles import Profile


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


@dataclass(frozen=True, slots=True)
class Note:
    """A part of a config that may not do what its author expects."""

    code: NoteCode
    place: str
    """Where it is written: `config.yaml:7: $.vgpu-configs.mine[0]`."""
    message: str

    @property
    def text(self) -> str:
        """The note with its place."""
        return f"{self.place}: {self.message}"


@dataclass(frozen=True, slots=True)
class Entry:
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

    def picks_as(self, other: "Entry") -> bool:
        """Return whether it has the same `devices` and `device-filter` as another entry."""
        return (self.indices, self.filters) == (other.indices, other.filters)

"""Entries of vGPU configs: which vGPUs are wanted on which GPUs of a node, and what is odd about that."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.devicefilter import DeviceFilter
from gpuvirt.model.vgputypes.profiles import Profile


class Sizes(StrEnum):
    """Whether vGPUs of several sizes may be on a GPU at a time."""

    EQUAL = "equal"
    MIXED = "mixed"


class NoteCode(StrEnum):
    """What is odd about a config, though it can be used."""

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
    """Something in a config that does not do what its author may think."""

    code: NoteCode
    place: str
    """Where it stands: `config.yaml:7: $.vgpu-configs.mine[0]`."""
    message: str

    @property
    def text(self) -> str:
        """The note for a person."""
        return f"{self.place}: {self.message}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a named config."""

    types: Mapping[Profile, int]
    """How many of each type are wanted on each GPU; none at all where it is empty."""
    indices: frozenset[int] | None = None
    """GPUs by their place in the order of PCI addresses; None for all."""
    filters: frozenset[DeviceFilter] | None = None
    """Any of which must match; None for no filter, and an empty one, where all were malformed, matches nothing."""
    scheduler: Scheduler | None = None
    """None leaves the GPU's scheduler alone."""
    sizes: Sizes | None = None
    """None leaves the GPU's mode alone."""
    place: str = ""
    """Where the entry stands."""

    @property
    def is_for_all(self) -> bool:
        """Return whether it picks no GPUs."""
        return self.indices is None and self.filters is None

    def picks_as(self, other: "Entry") -> bool:
        """Return whether it picks the same GPUs as another entry, in the same words."""
        return (self.indices, self.filters) == (other.indices, other.filters)

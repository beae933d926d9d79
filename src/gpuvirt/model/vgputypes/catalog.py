"""The cards that carry vGPUs, and their types: how many fit, their placements, and the GPU instances that they need.

All numbers are data (`cards/*.json`), since they can't be calculated: 32 A40-1Q fit and not 48, and DC-1-2Q needs a GPU
instance of 24 GB. If a host reports other numbers, the host is right: the catalog serves hosts that have not reported
yet, and resolves configs. Numbers without a source are None, and never a guess.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from gpuvirt import documents
from gpuvirt.facts.ids import PciId, parse_pci_id
from gpuvirt.facts.pci import NVIDIA, PciFunction
from gpuvirt.model.vgputypes.profiles import Profile, Series, Suffix

FAMILIES = ("maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")

_CARDS = Path(__file__).with_name("cards")

_ATTRIBUTES = {Suffix.ME: "+me", Suffix.NOME: "-me", Suffix.MEALL: "+me.all", Suffix.GFX: "+gfx"}

VGA, AMPERE = 0x0300, 0x2000
"""The class of displays, and the first device id of NVIDIA's cards whose vGPUs are on VFs."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", gc=False):
    """Types of one size, which differ in series alone."""

    gb: int
    series: str
    most: int
    slices: int | None = None
    suffix: Suffix | None = None
    gpu_instance: str | None = None
    each: int = 1
    spelled: tuple[Suffix, ...] = ()


class _Mixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Types of one size on a GPU in mixed-size mode."""

    gb: int
    most: int
    placements: tuple[int, ...] | None = None


class _Ids(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    device: str
    subsystem: str | None = None


class _Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", gc=False):
    gpu: str
    board: str
    ids: tuple[_Ids, ...]
    framebuffer_mib: int
    table: str
    mixed_sizes: bool | None = None
    mixed: str | None = None


class _Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    tables: dict[str, tuple[_Row, ...]]
    cards: tuple[_Card, ...]


class CardId(msgspec.Struct, frozen=True):
    """The PCI ids of a card; without a subsystem, all boards of the device id are this card."""

    device: PciId
    subsystem: PciId | None = None


class NeededInstance(msgspec.Struct, frozen=True):
    """The MIG GPU instance that a type needs."""

    profile: str
    """The profile's name in nvidia-smi: `1g.24gb+gfx`."""
    each: int
    """The number of vGPUs of the type that share one such instance."""


class CardType(msgspec.Struct, frozen=True):
    """A vGPU type of one card."""

    profile: Profile
    """The type's name on the host, in its parts."""
    most: int
    """The number of vGPUs that fit on a GPU in equal-size mode; for a MIG-backed type, with as many GPU instances of
    its kind as fit."""
    most_mixed: int | None = None
    """The number that fits in mixed-size mode, if it is documented."""
    placements: tuple[int, ...] | None = None
    """The placement ids in mixed-size mode (in GB of framebuffer), if they are documented."""
    gpu_instance: NeededInstance | None = None
    spelled: tuple[Profile, ...] = ()
    """Other names of the type in configs: `DC-1-24QGFX`."""


class Card(msgspec.Struct, frozen=True):
    """A card that carries vGPUs. Two cards may share a device id, or the name in their types (`DC`)."""

    gpu: str
    """The card's name in its types: `A10`."""
    product_name: str
    """The card's full name."""
    ids: tuple[CardId, ...]
    framebuffer_mib: int
    mixed_sizes: bool | None
    """Whether the card has mixed-size mode; None if only the host can report that."""
    _rows: tuple[_Row, ...]
    _mixed: tuple[_Mixed, ...]

    @property
    def is_mig(self) -> bool:
        """Whether the card has MIG mode."""
        return any(row.slices is not None for row in self._rows)

    @property
    def slices(self) -> int:
        """The number of compute slices of the card; 0 if it has no MIG mode."""
        return max((row.slices or 0 for row in self._rows), default=0)

    def types(self) -> Iterator[CardType]:
        """Yield the card's types, small ones first, time-sliced ones before MIG-backed ones."""
        for row in self._rows:
            for series in row.series:
                yield self._type(row, Series(series))

    def find(self, requested: Profile) -> CardType | None:
        """Return the type of a name on this card: the one of exactly this name, else of the name without its suffix."""
        return self._named(requested) or self._named(requested.bare)

    def gpu_instance(self, requested: Profile) -> NeededInstance | None:
        """Return the GPU instance that a MIG-backed type needs; None for time-sliced and unknown types.

        The type has the size. A suffix that the host's name lacks has the instance's other attributes.
        """
        found = self.find(requested)
        if found is None or found.gpu_instance is None or requested.suffix is found.profile.suffix:
            return found.gpu_instance if found else None
        size = found.gpu_instance.profile.partition("+")[0]
        attribute = _ATTRIBUTES[requested.suffix] if requested.suffix else ""
        return NeededInstance(f"{size}{attribute}", found.gpu_instance.each)

    def _named(self, requested: Profile) -> CardType | None:
        if requested.gpu != self.gpu:
            return None
        desired = (requested.gb, requested.slices, requested.suffix)
        rows = (
            row for row in self._rows if (row.gb, row.slices, row.suffix) == desired and requested.series in row.series
        )
        return next((self._type(row, requested.series) for row in rows), None)

    def _type(self, row: _Row, series: Series) -> CardType:
        profile = Profile(self.gpu, row.slices, row.gb, series, row.suffix)
        if row.slices is not None:
            spelled = tuple(Profile(self.gpu, row.slices, row.gb, series, suffix) for suffix in row.spelled)
            instance = NeededInstance(row.gpu_instance, row.each) if row.gpu_instance else None
            return CardType(profile, row.most, gpu_instance=instance, spelled=spelled)
        mixed = next((mixed_row for mixed_row in self._mixed if mixed_row.gb == row.gb), None)
        return CardType(profile, row.most, mixed.most if mixed else None, mixed.placements if mixed else None)


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, older ones first."""
    mixed = documents.from_json(_content("mixed"), dict[str, tuple[_Mixed, ...]])
    families = (documents.from_json(_content(name), _Family) for name in FAMILIES)
    return tuple(_card(card, family.tables, mixed) for family in families for card in family.cards)


@cache
def cards_of(device: PciId, subsystem: PciId | None) -> tuple[Card, ...]:
    """Return the possible cards of a GPU by its ids: none, one, or several if its subsystem id is unknown.

    If no card of a shared device id has the GPU's subsystem id, all of them are possible.
    """
    by_device = [(card, card_id) for card in cards() for card_id in card.ids if card_id.device == device]
    exact = [card for card, card_id in by_device if card_id.subsystem in {None, subsystem}]
    return tuple(exact or (card for card, _ in by_device))


def in_display_mode(function: PciFunction) -> bool:
    """Return whether a card that carries vGPUs is in display mode, in which it carries none.

    Since Ampere (ids from 2000), vGPUs are on VFs. Such a card in display mode is a VGA controller without SR-IOV.
    """
    is_display = function.class_code >> 8 == VGA and function.physfn is None and function.sriov_total_vfs is None
    is_new = function.id.vendor == NVIDIA and function.id.device >= AMPERE
    return is_display and is_new and bool(cards_of(function.id, function.subsystem))


def cards_called(gpu: str) -> tuple[Card, ...]:
    """Return the cards whose name in types is `gpu`."""
    return tuple(card for card in cards() if card.gpu == gpu)


def gpu_instances(card: Card, types: Mapping[Profile, int]) -> Mapping[str, int]:
    """Return how many GPU instances of each profile a set of MIG-backed vGPUs needs.

    Types do not share instances, so the needs of two types of one profile add up. Types that the card does not have are
    left out.
    """
    needed: dict[str, int] = {}
    for profile, count in types.items():
        instance = card.gpu_instance(profile)
        if instance is not None:
            needed[instance.profile] = needed.get(instance.profile, 0) + -(-count // instance.each)
    return needed


def _card(card: _Card, tables: Mapping[str, tuple[_Row, ...]], mixed: Mapping[str, tuple[_Mixed, ...]]) -> Card:
    ids = tuple(
        CardId(parse_pci_id(entry.device), parse_pci_id(entry.subsystem) if entry.subsystem else None)
        for entry in card.ids
    )
    rows = tables[card.table]
    return Card(
        gpu=card.gpu,
        product_name=card.board,
        ids=ids,
        framebuffer_mib=card.framebuffer_mib,
        mixed_sizes=card.mixed_sizes,
        _rows=rows,
        _mixed=mixed[card.mixed] if card.mixed else (),
    )


def _content(name: str) -> bytes:
    return (_CARDS / f"{name}.json").read_bytes()

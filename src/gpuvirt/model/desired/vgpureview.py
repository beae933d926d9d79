"""Compares the types of an entry of a vGPU config with the catalog."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.model.desired.vgpuentries import NoteCode, Sizes
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Profile


@dataclass(frozen=True, slots=True)
class TypeNote:
    """A note on a type, or on all types of an entry."""

    code: NoteCode
    message: str
    type: Profile | None = None


def review(types: Mapping[Profile, int], sizes: Sizes | None) -> Iterator[TypeNote]:
    """Yield notes on the types; none is an error, since a host's driver may be newer than the catalog."""
    for profile, count in types.items():
        yield from _review_type(profile, count, sizes)
    gbs = sorted({profile.gb for profile in types if not profile.is_mig})
    if len(gbs) > 1 and sizes is not Sizes.MIXED:
        listed = ", ".join(f"{gb} GB" if gb else "512 MiB" for gb in gbs)
        yield TypeNote(
            NoteCode.SIZES_DIFFER,
            f"a GPU carries time-sliced vGPUs of one size at a time, but these have {listed}; use one size, or write"
            " `sizes: mixed` where the card supports it",
        )


def _review_type(profile: Profile, count: int, sizes: Sizes | None) -> Iterator[TypeNote]:
    cards = catalog.cards_called(profile.gpu)
    found = [kind for card in cards if (kind := card.find(profile))]
    if not found:
        missing = f"type {profile}" if cards else f"card {profile.gpu}"
        message = f"gpuvirt's catalog has no {missing}; {_alternatives(profile, cards)}"
        yield TypeNote(NoteCode.UNKNOWN_TYPE, message, profile)
        return
    mixed = [kind.most_mixed for kind in found if sizes is Sizes.MIXED and kind.most_mixed is not None]
    most = max(mixed) if len(mixed) == len(found) else max(kind.most for kind in found)
    if count > most:
        mode = " of mixed sizes" if mixed else ""
        message = (
            f"sets {count} on each GPU, but {most}{mode} fit on one ({cards[0].product_name}); write {most} or less"
        )
        yield TypeNote(NoteCode.TOO_MANY, message, profile)


def _alternatives(profile: Profile, cards: Iterable[Card]) -> str:
    """Return existing types in place of an unknown one, as the end of a sentence."""
    profiles = [kind.profile for card in cards for kind in card.types()]
    of_series = [known for known in profiles if known.series is profile.series]
    similar = [known for known in of_series if known.slices == profile.slices] or of_series
    if similar:
        return f"there are {', '.join(dict.fromkeys(known.text for known in similar))}"
    names = [known.text for known in profiles] or sorted({card.gpu for card in catalog.cards()})
    near = nearest(profile.text if profiles else profile.gpu, names)
    return f"did you mean {near}?" if near else "a driver newer than gpuvirt may have it"

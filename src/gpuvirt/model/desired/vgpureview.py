"""What the catalog finds odd about the types that one entry of a vGPU config wants."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.model.desired.vgpuentries import NoteCode, Sizes
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Profile


@dataclass(frozen=True, slots=True)
class MalformedEntry:
    """What is odd about a type, or about all of them together."""

    code: NoteCode
    message: str
    type: Profile | None = None


def review(types: Mapping[Profile, int], sizes: Sizes | None) -> Iterator[MalformedEntry]:
    """Yield what is odd; none of it is an error, since a host may know more than the catalog."""
    for profile, count in types.items():
        yield from _review_type(profile, count, sizes)
    gbs = sorted({profile.gb for profile in types if not profile.is_mig})
    if len(gbs) > 1 and sizes is not Sizes.MIXED:
        listed = ", ".join(f"{gb} GB" if gb else "512 MiB" for gb in gbs)
        yield MalformedEntry(
            NoteCode.SIZES_DIFFER,
            f"a GPU holds time-sliced vGPUs of one size at a time, and these have {listed}; take one size, or write"
            " `sizes: mixed` where the card can",
        )


def _review_type(profile: Profile, count: int, sizes: Sizes | None) -> Iterator[MalformedEntry]:
    cards = catalog.cards_called(profile.gpu)
    found = [one for card in cards if (one := card.find(profile))]
    if not found:
        what = f"no card has a type {profile}" if cards else f"no card's types are called {profile.gpu}"
        yield MalformedEntry(NoteCode.UNKNOWN_TYPE, f"{what} that gpuvirt knows of; {_meant(profile, cards)}", profile)
        return
    mixed = [one.most_mixed for one in found if sizes is Sizes.MIXED and one.most_mixed is not None]
    most = max(mixed) if len(mixed) == len(found) else max(one.most for one in found)
    if count > most:
        mode = " of mixed sizes" if mixed else ""
        message = f"wants {count} on each GPU, and {most}{mode} fit on one ({cards[0].board}); write {most} or less"
        yield MalformedEntry(NoteCode.TOO_MANY, message, profile)


def _meant(profile: Profile, cards: Iterable[Card]) -> str:
    """Return what there is instead of a type that no card has."""
    types = [one.profile for card in cards for one in card.types()]
    of_series = [one for one in types if one.series is profile.series]
    like = [one for one in of_series if one.slices == profile.slices] or of_series
    if like:
        return f"there are {', '.join(dict.fromkeys(one.text for one in like))}"
    names = [one.text for one in types] or sorted({one.gpu for one in catalog.cards()})
    meant = nearest(profile.text if types else profile.gpu, names)
    return f"did you mean {meant}?" if meant else "a driver newer than gpuvirt may know it"

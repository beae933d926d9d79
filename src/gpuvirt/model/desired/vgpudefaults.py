"""The vGPU configs that every node knows without a file: `default`, and one for each type of the catalog.

They are made when somebody asks for them, since there are a thousand, and a node needs one.
"""

from collections.abc import Iterator, Mapping

from typing_extensions import override

from gpuvirt.errors import InvalidIdError
from gpuvirt.model.desired.devicefilter import DeviceFilter
from gpuvirt.model.desired.vgpuentries import Entry
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Profile, Series, parse_profile

DEFAULT = "default"
"""Q-series vGPUs of half the framebuffer; C-series where a card has no Q; the whole card where none fits twice."""


class BuiltinConfigs(Mapping[str, tuple[Entry, ...]]):
    """The built-in configs by name."""

    @override
    def __getitem__(self, name: str) -> tuple[Entry, ...]:
        entries = _default() if name == DEFAULT else _of_type(name)
        if not entries:
            raise KeyError(name)
        return entries

    @override
    def __iter__(self) -> Iterator[str]:
        yield DEFAULT
        yield from dict.fromkeys(
            profile.text for card in catalog.cards() for one in card.types() for profile in (one.profile, *one.spelled)
        )

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def builtin_configs() -> BuiltinConfigs:
    """Return the built-in configs."""
    return BuiltinConfigs()


def _default() -> tuple[Entry, ...]:
    """Return two of the largest vGPUs that fit twice on each card, else the largest of all.

    Filters name the subsystem where two cards have one device id, so that each GPU has one entry.
    """
    return tuple(
        Entry({one.profile: min(one.most, 2)}, filters=_filters(card), place=f"built-in {DEFAULT}: {card.board}")
        for card in catalog.cards()
        for one in (_half(card),)
    )


def _half(card: Card) -> CardType:
    sliced = [one for one in card.types() if not one.profile.is_mig]
    series = Series.Q if any(one.profile.series is Series.Q for one in sliced) else Series.C
    ours = sorted((one for one in sliced if one.profile.series is series), key=lambda one: one.profile.gb)
    return next((one for one in reversed(ours) if one.most > 1), ours[-1])


def _of_type(name: str) -> tuple[Entry, ...]:
    """Return the entries that make as many of a type as fit; none for an unknown name.

    Cards that hold different numbers of a type of one name (`DC-16Q`) are told apart by their ids. Otherwise ids are
    left out: a board that is newer than the catalog may have the type too.
    """
    try:
        profile = parse_profile(name)
    except InvalidIdError:
        return ()
    mosts = {card: found.most for card in catalog.cards_called(profile.gpu) if (found := _exact(card, profile))}
    if len(set(mosts.values())) == 1 and len(mosts) == len(catalog.cards_called(profile.gpu)):
        return (Entry({profile: next(iter(mosts.values()))}, place=f"built-in {name}"),)
    return tuple(
        Entry({profile: most}, filters=_filters(card), place=f"built-in {name}: {card.board}")
        for card, most in mosts.items()
    )


def _exact(card: Card, profile: Profile) -> CardType | None:
    """Return the type of that very name, or one that configs spell so."""
    found = card.find(profile)
    return found if found and profile in {found.profile, *found.spelled} else None


def _filters(card: Card) -> frozenset[DeviceFilter]:
    return frozenset(DeviceFilter(one.device, one.subsystem) for one in card.ids)

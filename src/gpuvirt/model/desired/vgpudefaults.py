"""The built-in vGPU configs, which need no file: `default`, and one for each type of the catalog.

A config is created when it is looked up: the catalog has a thousand types, and a node needs one config.
"""

from collections.abc import Iterator, Mapping

from typing_extensions import override

from gpuvirt.errors import InvalidIdError
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, DeviceFilter
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Profile, Series, parse_profile

DEFAULT = "default"
"""Q-series vGPUs with half of the framebuffer; C-series where a card has no Q; one vGPU where none fits twice."""


class BuiltinConfigs(Mapping[str, tuple[ConfigEntry, ...]]):
    """The built-in configs by name."""

    @override
    def __getitem__(self, name: str) -> tuple[ConfigEntry, ...]:
        entries = _default() if name == DEFAULT else _of_type(name)
        if not entries:
            raise KeyError(name)
        return entries

    @override
    def __iter__(self) -> Iterator[str]:
        yield DEFAULT
        yield from dict.fromkeys(
            profile.text
            for card in catalog.cards()
            for kind in card.types()
            for profile in (kind.profile, *kind.spelled)
        )

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def builtin_configs() -> BuiltinConfigs:
    """Return the built-in configs."""
    return BuiltinConfigs()


def _default() -> tuple[ConfigEntry, ...]:
    """Return two of the largest vGPUs that fit twice on each card, else the largest of all.

    Filters name the subsystem where two cards have one device id, so that each GPU has one entry.
    """
    return tuple(
        ConfigEntry(
            {half.profile: min(half.most, 2)}, filters=_filters(card), place=f"built-in {DEFAULT}: {card.product_name}"
        )
        for card in catalog.cards()
        for half in (_half_of(card),)
    )


def _half_of(card: Card) -> CardType:
    sliced = [kind for kind in card.types() if not kind.profile.is_mig]
    series = Series.Q if any(kind.profile.series is Series.Q for kind in sliced) else Series.C
    of_series = sorted((kind for kind in sliced if kind.profile.series is series), key=lambda kind: kind.profile.gb)
    return next((kind for kind in reversed(of_series) if kind.most > 1), of_series[-1])


def _of_type(name: str) -> tuple[ConfigEntry, ...]:
    """Return the entries that create as many vGPUs of a type as fit; none for an unknown name.

    The entries filter by id only where cards carry different numbers of a type of the same name (`DC-16Q`). Otherwise
    they have no filter, so that boards newer than the catalog match too.
    """
    try:
        profile = parse_profile(name)
    except InvalidIdError:
        return ()
    mosts = {card: found.most for card in catalog.cards_called(profile.gpu) if (found := _exact(card, profile))}
    if len(set(mosts.values())) == 1 and len(mosts) == len(catalog.cards_called(profile.gpu)):
        return (ConfigEntry({profile: next(iter(mosts.values()))}, place=f"built-in {name}"),)
    return tuple(
        ConfigEntry({profile: most}, filters=_filters(card), place=f"built-in {name}: {card.product_name}")
        for card, most in mosts.items()
    )


def _exact(card: Card, profile: Profile) -> CardType | None:
    """Return the type of exactly that name, or of a name that configs use for it."""
    found = card.find(profile)
    return found if found and profile in {found.profile, *found.spelled} else None


def _filters(card: Card) -> frozenset[DeviceFilter]:
    return frozenset(DeviceFilter(ids.device, ids.subsystem) for ids in card.ids)

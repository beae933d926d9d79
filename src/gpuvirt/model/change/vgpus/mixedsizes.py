"""Tells whether vGPUs of several sizes fit on a GPU in mixed-size mode, as far as the catalog knows its placements.

The driver chooses placements by itself, so what is said to fit may still be refused by it; what is said not to fit
never fits.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, islice

from gpuvirt.facts.ids import VgpuType
from gpuvirt.model.change.vgpus.gpustate import profile_of
from gpuvirt.model.vgputypes.catalog import Card, CardType

MOST_LAYOUTS = 20_000
"""More ways to lay out the larger ones are not gone through: then the smaller ones are taken to fit."""
MIB_PER_GB = 1024


def fits(card: Card | None, counts: Mapping[VgpuType, int]) -> bool:
    """Return whether a card has room for so many of each type at once; types that it doesn't know take none."""
    if card is None:
        return True
    types = _by_size(card, counts)
    sizes = Counter({gb: sum(counts[one] for one in found) for gb, found in types.items()})
    known = {gb: card_type for gb, found in types.items() if (card_type := _card_type(card, found[0])) is not None}
    if any(one.most_mixed is not None and sizes[gb] > one.most_mixed for gb, one in known.items()):
        return False
    if sum((gb * MIB_PER_GB or MIB_PER_GB // 2) * number for gb, number in sizes.items()) > card.framebuffer_mib:
        return False
    placed = [(gb, sizes[gb], one.placements) for gb, one in known.items() if gb and one.placements is not None]
    return _packs(sorted(placed, reverse=True))


def _by_size(card: Card, counts: Mapping[VgpuType, int]) -> Mapping[int, list[VgpuType]]:
    found: dict[int, list[VgpuType]] = {}
    for vgpu_type in sorted(one for one, number in counts.items() if number):
        profile = profile_of(vgpu_type)
        if profile is not None and card.find(profile) is not None:
            found.setdefault(profile.gb, []).append(vgpu_type)
    return found


def _card_type(card: Card, vgpu_type: VgpuType) -> CardType | None:
    profile = profile_of(vgpu_type)
    return card.find(profile) if profile is not None else None


def _packs(sizes: Sequence[tuple[int, int, tuple[int, ...]]]) -> bool:
    """Return whether vGPUs of some sizes in GB, their numbers and placements, larger ones first, fit side by side.

    A layout is a bit for each GB. Placements of one size never overlap, so of the smallest it is enough to count those
    that are free.
    """
    layouts = {0}
    for number, (gb, desired_counts, placements) in enumerate(sizes, 1):
        spans = [((1 << gb) - 1) << place for place in placements]
        if number == len(sizes):
            return any(sum(1 for span in spans if not span & layout) >= desired_counts for layout in layouts)
        found = list(islice(_with(layouts, spans, desired_counts), MOST_LAYOUTS + 1))
        if len(found) > MOST_LAYOUTS:
            return True
        layouts = set(found)
    return bool(layouts)


def _with(layouts: Iterable[int], spans: Sequence[int], desired_counts: int) -> Iterable[int]:
    for layout in layouts:
        for chosen in combinations([span for span in spans if not span & layout], desired_counts):
            yield layout | sum(chosen)

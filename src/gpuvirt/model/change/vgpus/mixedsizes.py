"""Decides whether vGPUs of several sizes fit on a GPU in mixed-size mode, by the placements that the catalog has.

The driver chooses placements by itself, so it may refuse vGPUs that fit by this module. vGPUs that do not fit by this
module never fit.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, islice

from gpuvirt.facts.ids import VgpuType
from gpuvirt.model.change.vgpus.gpustate import profile_of
from gpuvirt.model.vgputypes.catalog import Card, CardType

MOST_LAYOUTS = 20_000
"""The most layouts of larger vGPUs that are tried. If there are more, the smaller vGPUs count as fitting."""
MIB_PER_GB = 1024


def fits(card: Card | None, counts: Mapping[VgpuType, int]) -> bool:
    """Return whether a card has room for these numbers of vGPUs at once; types that it does not have take no room."""
    if card is None:
        return True
    types = _by_size(card, counts)
    sizes = Counter({gb: sum(counts[vgpu_type] for vgpu_type in found) for gb, found in types.items()})
    known = {gb: card_type for gb, found in types.items() if (card_type := _card_type(card, found[0])) is not None}
    if any(card_type.most_mixed is not None and sizes[gb] > card_type.most_mixed for gb, card_type in known.items()):
        return False
    if sum((gb * MIB_PER_GB or MIB_PER_GB // 2) * number for gb, number in sizes.items()) > card.framebuffer_mib:
        return False
    placed = [
        (gb, sizes[gb], card_type.placements)
        for gb, card_type in known.items()
        if gb and card_type.placements is not None
    ]
    return _packs(sorted(placed, reverse=True))


def _by_size(card: Card, counts: Mapping[VgpuType, int]) -> Mapping[int, list[VgpuType]]:
    found: dict[int, list[VgpuType]] = {}
    for vgpu_type in sorted(vgpu_type for vgpu_type, number in counts.items() if number):
        profile = profile_of(vgpu_type)
        if profile is not None and card.find(profile) is not None:
            found.setdefault(profile.gb, []).append(vgpu_type)
    return found


def _card_type(card: Card, vgpu_type: VgpuType) -> CardType | None:
    profile = profile_of(vgpu_type)
    return card.find(profile) if profile is not None else None


def _packs(sizes: Sequence[tuple[int, int, tuple[int, ...]]]) -> bool:
    """Return whether vGPUs fit side by side; `sizes` has their GB, number and placements, the largest first.

    A layout is a bit for each GB. Placements of one size never overlap, so for the smallest size it is enough to count
    the free placements.
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

"""Where a card's GPU instances lie: how many memory slices each takes, and where one may begin.

An instance takes as many memory slices as its framebuffer is of the card's; it begins at a multiple of these, and its
compute slices must end by the card's last. So are the placements that `nvidia-smi mig -lgipp` lists (NVIDIA's MIG user
guide), and so many of each profile fit as NVIDIA documents for each card that the catalog has.
"""

import re
from collections.abc import Iterable

from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.model.vgputypes.catalog import Card

_KIND = re.compile(r"([0-9]+)g\.([0-9]+)gb")
_MIB_PER_GB = 1024


def kind_of(profile: str) -> str:
    """Return what instances are told apart by: `1g.24gb` for `1g.24gb+gfx`, since a type may stand on both."""
    match = _KIND.match(profile)
    return match[0] if match else profile


def place(card: Card, standing: Iterable[GpuInstance], profiles: Iterable[str]) -> list[tuple[str, int]]:
    """Return where instances of these profiles can begin beside those that stand, as many as find a place.

    Large ones come first, and each takes the last place that is free, which leaves the most to others: the last of an
    A100's eight memory slices is of use only to an instance that takes more than one.
    """
    taken = {number for one in standing for number in range(one.start, one.start + one.size)}
    placed: list[tuple[str, int]] = []
    for profile in sorted(profiles, key=lambda one: (-_size(card, one), -_compute_slices(one), one)):
        size = _size(card, profile)
        free = (start for start in reversed(starts(card, profile)) if taken.isdisjoint(range(start, start + size)))
        if (start := next(free, None)) is not None:
            taken |= set(range(start, start + size))
            placed.append((profile, start))
    return placed


def starts(card: Card, profile: str) -> list[int]:
    """Return the memory slices at which an instance may begin; none for what is no profile of a GPU instance."""
    size, compute_slices = _size(card, profile), _compute_slices(profile)
    if not size:
        return []
    return [start for start in range(0, _memory_slices(card), size) if start + compute_slices <= card.slices]


def _memory_slices(card: Card) -> int:
    """Return how many there are: the next power of two, so eight for seven compute slices."""
    return 1 << (card.slices - 1).bit_length()


def _size(card: Card, profile: str) -> int:
    match = _KIND.match(profile)
    return round(int(match[2]) * _MIB_PER_GB * _memory_slices(card) / card.framebuffer_mib) if match else 0


def _compute_slices(profile: str) -> int:
    match = _KIND.match(profile)
    return int(match[1]) if match else 0

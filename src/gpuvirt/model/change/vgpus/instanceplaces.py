"""The placements of a card's GPU instances: how many memory slices each takes, and at which slice it may start.

An instance's share of the memory slices is its share of the card's framebuffer. It starts at a multiple of its size,
and its compute slices must end by the card's last. These are the placements that `nvidia-smi mig -lgipp` lists
(NVIDIA's MIG user guide), and they give the number of instances that NVIDIA documents for each card of the catalog.
"""

import re
from collections.abc import Iterable

from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.model.vgputypes.catalog import Card

_KIND = re.compile(r"([0-9]+)g\.([0-9]+)gb")
_MIB_PER_GB = 1024


def kind_of(profile: str) -> str:
    """Return the kind of a profile, `1g.24gb` for `1g.24gb+gfx`: a type may use instances of both."""
    match = _KIND.match(profile)
    return match[0] if match else profile


def place(card: Card, standing: Iterable[GpuInstance], profiles: Iterable[str]) -> list[tuple[str, int]]:
    """Return the profiles that fit beside the `standing` instances, each with the memory slice at which it starts.

    Large instances come first, and each takes the last place that is free, which leaves the most room for others: only
    an instance of more than one memory slice can use the last of an A100's eight.
    """
    taken = {number for instance in standing for number in range(instance.start, instance.start + instance.size)}
    placed: list[tuple[str, int]] = []
    for profile in sorted(profiles, key=lambda name: (-_size(card, name), -_compute_slices(name), name)):
        size = _size(card, profile)
        free = (start for start in reversed(starts(card, profile)) if taken.isdisjoint(range(start, start + size)))
        if (start := next(free, None)) is not None:
            taken |= set(range(start, start + size))
            placed.append((profile, start))
    return placed


def starts(card: Card, profile: str) -> list[int]:
    """Return the memory slices at which an instance may start; none if `profile` is not one of a GPU instance."""
    size, compute_slices = _size(card, profile), _compute_slices(profile)
    if not size:
        return []
    return [start for start in range(0, _memory_slices(card), size) if start + compute_slices <= card.slices]


def _memory_slices(card: Card) -> int:
    """Return the number of memory slices: the next power of two, so eight for seven compute slices."""
    return 1 << (card.slices - 1).bit_length()


def _size(card: Card, profile: str) -> int:
    match = _KIND.match(profile)
    return round(int(match[2]) * _MIB_PER_GB * _memory_slices(card) / card.framebuffer_mib) if match else 0


def _compute_slices(profile: str) -> int:
    match = _KIND.match(profile)
    return int(match[1]) if match else 0

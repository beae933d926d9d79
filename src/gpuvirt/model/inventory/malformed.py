"""What a host shows that can't be, or could not be read, and speaks against no device."""

from collections.abc import Iterator

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.reasons import Reason, notoffered, refusals

VITAL = frozenset({"vendor", "device", "class", "driver", "iommu_group"})
"""Attributes of a function that speak against its device when they can't be read."""


def malformed_entries(facts: Facts) -> Iterator[Reason]:
    """Yield what is odd about a host, and is no device's fault."""
    for malformed in facts.malformed_entries:
        yield notoffered.malformed(malformed.path, malformed.what)
    for unread in _odd_attributes(facts):
        yield notoffered.malformed(unread.path, f"can't be understood: {unread.said}; it is passed over")
    for unread in facts.unread:
        yield refusals.unread(unread.path, unread, "its last known state is kept")


def _odd_attributes(facts: Facts) -> Iterator[Unread]:
    """Yield what reads as nothing that it could be, and speaks against no device: a NUMA node, a revision."""
    for function in facts.functions.values():
        for unread in function.unread:
            if unread.seen is not None and unread.path.rpartition("/")[2] not in VITAL:
                yield unread

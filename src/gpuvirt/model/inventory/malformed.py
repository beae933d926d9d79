"""Malformed and unread entries of sysfs that do not keep a device from being offered."""

from collections.abc import Iterator

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.reasons import Reason, notoffered, refusals

VITAL = frozenset({"vendor", "device", "class", "driver", "iommu_group"})
"""Attributes of a function that keep its device from being offered when they can't be read."""


def malformed_entries(facts: Facts) -> Iterator[Reason]:
    """Yield a reason for each entry that is malformed or could not be read, and that concerns no device."""
    for malformed in facts.malformed_entries:
        yield notoffered.malformed(malformed.path, malformed.what)
    for unread in _odd_attributes(facts):
        yield notoffered.malformed(unread.path, f"can't be understood: {unread.said}; gpuvirt ignores it")
    for unread in facts.unread:
        yield refusals.unread(unread.path, unread, "its last known state is kept")


def _odd_attributes(facts: Facts) -> Iterator[Unread]:
    """Yield attributes with an invalid value that keep no device from being offered: a NUMA node, a revision."""
    for function in facts.functions.values():
        for unread in function.unread:
            if unread.seen is not None and unread.path.rpartition("/")[2] not in VITAL:
                yield unread

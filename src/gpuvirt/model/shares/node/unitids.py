"""The ids of units in the kubelet: `u0`, `u1` ... `u1jj`, which name no GPU.

The kubelet needs an id for each unit, and chooses any of them. Units are fungible, so an id says nothing about a GPU,
and has no NUMA node. The ids are short because the kubelet repeats them in its checkpoint and in pods' statuses. They
are no numbers, since other device plugins use the numbers of IOMMU groups as ids.
"""

import re
from collections.abc import Collection
from itertools import islice
from string import ascii_lowercase, digits

from gpuvirt.facts.ids import DeviceId

MOST_UNITS = 100_000
"""A hundred whole GPUs; five characters are enough for sixteen times as many."""
_DIGITS = digits + ascii_lowercase
_ID = re.compile(r"u(?:0|[1-9a-z][0-9a-z]{0,3})")


def unit_ids(count: int, allocated: Collection[DeviceId]) -> tuple[DeviceId, ...]:
    """Return the ids to list: as many as there are units, with all those that containers have.

    Containers keep their units while GPUs become unhealthy, so the ids that are allocated stay, and free ids go first.
    """
    count = min(count, MOST_UNITS)
    ours = {device for device in allocated if is_unit_id(device)}
    free = (device for device in map(unit_id, range(MOST_UNITS + len(ours))) if device not in ours)
    return tuple(sorted((*ours, *islice(free, max(count - len(ours), 0))), key=lambda device: (len(device), device)))


def unit_id(number: int) -> DeviceId:
    """Return the id of a unit."""
    text = ""
    while number or not text:
        number, last = divmod(number, len(_DIGITS))
        text = _DIGITS[last] + text
    return DeviceId(f"u{text}")


def is_unit_id(device: DeviceId) -> bool:
    """Return whether an id is one of a unit; the kubelet's record may have others, of another plugin."""
    return _ID.fullmatch(device) is not None

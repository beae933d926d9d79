"""Invalid desired state: where it was set, the value found, the expected value, and the nearest valid names.

An invalid value changes no device. It is detected once, as data, and every output shows that data: log, metrics,
node.json, command line, GpuNode, events, labels and ClusterPolicy.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec

from gpuvirt.model.inventory.nearness import nearest, nearest_names, types_of_card
from gpuvirt.model.reasons import Reason, Seen, nodeproblems

MOST_NEAR = 5
"""The most valid names that a message lists."""
MOST_FOUND = 80
"""The most characters of a found value that a message repeats."""


class Origin(StrEnum):
    """The kinds of places in which desired state is set; the values of the metric's label `origin`."""

    LABEL = "label"
    GPU_NODE = "gpunode"
    CONFIG_MAP = "configmap"
    FILE = "file"
    """A file of vGPU configs."""
    SETTINGS = "settings"
    """The agent's own file, `--config`."""
    CLUSTER_POLICY = "clusterpolicy"


class Source(msgspec.Struct, frozen=True):
    """Where a value of the desired state is set."""

    origin: Origin
    where: str
    """The label, or the object and the field: `GpuNode $.spec.gpus[0].address`."""


class InvalidDesired(msgspec.Struct, frozen=True):
    """An invalid value of the desired state."""

    origin: Origin
    where: str
    found: str
    expected: str
    near: tuple[str, ...]
    """The nearest valid values, the nearest first."""
    reason: Reason
    """The reason with these facts in its words."""


def invalid(  # noqa: PLR0913  the parts of an error
    source: Source,
    found: str,
    problem: str,
    *,
    expected: str,
    known: Iterable[str] = (),
    seen: Seen | None = None,
    fix: str | None = None,
) -> InvalidDesired:
    """Return an invalid value; `problem` is a sentence about the source, `known` are the valid values."""
    names = tuple(dict.fromkeys(known))
    near, nearest_name = _nearest(found, names)
    hint = f"did you mean {nearest_name}? " if nearest_name is not None else ""
    more = f"; {fix}" if fix is not None else ""
    reason = nodeproblems.config_invalid(
        source.where,
        problem,
        f"{hint}expected {expected}{_listed(near, len(names))}{more}",
        *((seen,) if seen is not None else ()),
    )
    return InvalidDesired(source.origin, source.where, found, expected, near, reason)


@lru_cache(maxsize=64)
def _nearest(found: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Return the nearest names, and the probably intended one.

    The result is cached: the agent evaluates an invalid value again and again, and there may be a thousand names.
    """
    if types := types_of_card(found, names):
        return types, None
    return nearest_names(found, names, MOST_NEAR), nearest(found, names)


def refused(source: Source, found: str, expected: str, known: Collection[str], reason: Reason) -> InvalidDesired:
    """Return a value that is invalid for an existing reason."""
    return InvalidDesired(source.origin, source.where, found, expected, _nearest(found, tuple(known))[0], reason)


def _listed(near: Sequence[str], total: int) -> str:
    """Return the nearest of all valid values, as the end of a sentence."""
    if not near:
        return ""
    more = f" and {total - len(near)} more" if total > len(near) else ""
    return f", of which the nearest are: {', '.join(near)}{more}" if more else f": {', '.join(near)}"


def quoted(value: str) -> str:
    """Return a value in quotes, shortened for messages."""
    return repr(value if len(value) <= MOST_FOUND else f"{value[:MOST_FOUND]}...")


def unknown_addresses(sources: Mapping[str, Source], gpus: Collection[str]) -> tuple[InvalidDesired, ...]:
    """Return the addresses at which the host has no GPU; `sources` has the place of each address."""
    return tuple(
        invalid(
            source,
            address,
            f"names {quoted(address)}, but no GPU of this node has that address, so the entry has no effect",
            expected="the PCI address of a GPU of this node",
            known=sorted(gpus),
            fix="gpuvirt devices lists them",
        )
        for address, source in sources.items()
        if address not in gpus
    )

"""Desired state that is invalid: where it was set, what was found, what is expected, and the nearest valid names.

An invalid value changes nothing on any device. It is found once, as data, and every outlet shows that data: log,
metrics, node.json, command line, GpuNode, events, labels and ClusterPolicy.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from gpuvirt.model.inventory.nearness import nearest, nearest_names
from gpuvirt.model.reasons import Reason, Seen, nodeproblems

MOST_NEAR = 5
"""Valid names that a message lists."""
MOST_FOUND = 80
"""Characters of a found value that a message repeats."""


class Origin(StrEnum):
    """The kinds of places in which desired state is set, as the metric's label `origin` has them."""

    LABEL = "label"
    GPU_NODE = "gpunode"
    CONFIG_MAP = "configmap"
    FILE = "file"
    """A file of vGPU configs."""
    SETTINGS = "settings"
    """The agent's own file, `--config`."""
    CLUSTER_POLICY = "clusterpolicy"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value of the desired state is set."""

    origin: Origin
    where: str
    """The label, or the object and the field: `GpuNode $.spec.gpus[0].address`."""


@dataclass(frozen=True, slots=True)
class InvalidDesired:
    """One invalid value of the desired state."""

    origin: Origin
    where: str
    found: str
    expected: str
    near: tuple[str, ...]
    """The nearest valid values, the nearest first."""
    reason: Reason
    """The same in a sentence, as all other reasons are."""


def invalid(  # noqa: PLR0913  what an error says: where, found, expected, effect
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
    near, meant = _nearest(found, names)
    hint = f"did you mean {meant}? " if meant is not None else ""
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
    """Return the nearest names, and the one that is probably meant.

    It is kept, since conclusions are drawn again and again while a value is invalid, and there may be a thousand names.
    """
    return nearest_names(found, names, MOST_NEAR), nearest(found, names)


def refused(source: Source, found: str, expected: str, known: Collection[str], reason: Reason) -> InvalidDesired:
    """Return a value that is invalid for a reason which is known already."""
    return InvalidDesired(source.origin, source.where, found, expected, _nearest(found, tuple(known))[0], reason)


def _listed(near: Sequence[str], total: int) -> str:
    """Return the nearest of a number of valid values, as the end of a sentence."""
    if not near:
        return ""
    more = f" and {total - len(near)} more" if total > len(near) else ""
    return f", of which the nearest are: {', '.join(near)}{more}" if more else f": {', '.join(near)}"


def quoted(value: str) -> str:
    """Return a value as messages repeat it."""
    return repr(value if len(value) <= MOST_FOUND else f"{value[:MOST_FOUND]}...")


def unknown_addresses(sources: Mapping[str, Source], gpus: Collection[str]) -> tuple[InvalidDesired, ...]:
    """Return the addresses, by where each is named, at which the host has no GPU."""
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

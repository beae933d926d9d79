"""What is to become of the lists of permitted devices.

Four rules keep machines that may start from being refused: lists that are not there permit everything, so they are made
only where every name in use can be listed; an entry goes only where it is ours and nothing names it; somebody else's
entry is left as it is; and lists that we have made go again where they refuse what was permitted without them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpuvirt.cluster.operator.kubevirt.changes import Changes, OurEntry, Part
from gpuvirt.cluster.operator.kubevirt.names import Names
from gpuvirt.cluster.operator.kubevirt.offered import Offered
from gpuvirt.cluster.operator.kubevirt.subject import Entry, Subject
from gpuvirt.model.reasons import Reason, kubevirtproblems
from gpuvirt.model.selectors import normal, spellings


@dataclass(frozen=True, slots=True)
class Listing:
    """It."""

    wanted: tuple[OurEntry, ...] = ()
    """All that is to stand there of what nodes offer, whoever has written it."""
    add: tuple[OurEntry, ...] = ()
    mend: tuple[Entry, ...] = ()
    """Entries of ours that say that KubeVirt is to offer the devices."""
    out: tuple[Entry, ...] = ()
    dissolve: bool = False
    """All lists are to go."""
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Ground:
    """What it rests on."""

    subject: Subject
    ours: Changes
    offered: Offered
    """What nodes offer, without what KubeVirt offers itself by somebody else's entry."""
    names: Names
    leaves_mdevs: bool
    """Whether KubeVirt leaves mediated devices alone that no list has."""
    prune: bool = False
    """Whether entries of ours go that no node offers any more."""
    withheld: frozenset[str] = field(default_factory=frozenset)
    """What KubeVirt offers itself."""


def listing_of(ground: Ground) -> Listing:
    """Return what is to become of them."""
    entries = ground.subject.entries
    if entries is None:
        return _made(ground)
    why, out = _why_dissolved(ground, entries), tuple(_unused(ground, entries))
    spares = any(one.part is Part.MDEV for one in entries if one not in out) and not ground.leaves_mdevs
    if why is not None and not spares and all(is_ours(ground.ours, one) for one in entries):
        return Listing(dissolve=True, reasons=(why,))
    return _kept(ground, entries, out, (why,) if why is not None else ())


def is_ours(ours: Changes, entry: Entry) -> bool:
    """Return whether we have added an entry."""
    return OurEntry(entry.part, entry.selector, entry.resource) in ours.entries


def _made(ground: Ground) -> Listing:
    wanted = tuple(_wanted(ground.offered))
    if not wanted:
        return Listing()
    unlisted = sorted(ground.names.used - ground.offered.keys())
    if ground.names.unheard:
        return Listing(reasons=(kubevirtproblems.requests_unknown(ground.subject.where, ground.names.unheard),))
    if unlisted:
        return Listing(reasons=(kubevirtproblems.resource_not_permitted(ground.subject.where, unlisted),))
    fitting, reasons = _fitting(ground.subject, (), wanted)
    if ground.names.used - {one.resource for one in fitting}:
        return Listing(reasons=reasons)
    return Listing(wanted=fitting, add=fitting, reasons=reasons)


def _kept(ground: Ground, entries: Sequence[Entry], out: tuple[Entry, ...], reasons: tuple[Reason, ...]) -> Listing:
    there = {(one.part, normal(one.selector), one.resource) for one in entries if not one.disabled}
    wanted = tuple(_wanted(ground.offered))
    missing = tuple(one for one in wanted if (one.part, normal(one.selector), one.resource) not in there)
    add, taken = _fitting(ground.subject, [one for one in entries if one not in out], missing)
    return Listing(
        wanted=(*(one for one in wanted if one not in missing), *add),
        add=add,
        mend=tuple(one for one in entries if not one.external and is_ours(ground.ours, one)),
        out=out,
        reasons=(*reasons, *taken),
    )


def _wanted(offered: Offered) -> Iterator[OurEntry]:
    for name, selectors in offered.items():
        yield from (OurEntry(Part.PCI, one, name) for one in selectors.pci)
        yield from (OurEntry(Part.MDEV, one, name) for one in selectors.mdev)


def _fitting(
    subject: Subject, entries: Sequence[Entry], missing: Sequence[OurEntry]
) -> tuple[tuple[OurEntry, ...], tuple[Reason, ...]]:
    """Return what can be added, and why the rest can't.

    HCO's lists have each selector once, as it is spelt: all vGPU types of one card's VFs have the same id.
    """
    if not subject.is_hco:
        return tuple(missing), ()
    disabled = {(one.part, normal(one.selector), one.resource) for one in entries if one.disabled}
    taken = {(one.part, one.selector) for one in entries}
    fitting: list[OurEntry] = []
    reasons: list[Reason] = []
    for one in missing:
        free = (spelt for spelt in spellings(one.selector) if (one.part, spelt) not in taken)
        if (one.part, normal(one.selector), one.resource) in disabled:
            reasons.append(_taken(subject, one, "is disabled"))
        elif (selector := next(free, None)) is None:
            reasons.append(_taken(subject, one, "stands for other names, however it is written"))
        else:
            taken.add((one.part, selector))
            fitting.append(OurEntry(one.part, selector, one.resource))
    return tuple(fitting), tuple(reasons)


def _unused(ground: Ground, entries: Sequence[Entry]) -> Iterator[Entry]:
    if not ground.prune or ground.names.unheard:
        return
    busy = ground.names.used | ground.offered.keys() | ground.withheld
    yield from (one for one in entries if is_ours(ground.ours, one) and one.resource not in busy)


def _why_dissolved(ground: Ground, entries: Sequence[Entry]) -> Reason | None:
    """Return what our own lists refuse that was permitted before they were there."""
    if ground.subject.permitted not in ground.ours.made or ground.names.unheard:
        return None
    listed = {one.resource for one in entries if not one.disabled}
    refused = sorted(ground.names.used - listed - ground.offered.keys())
    return kubevirtproblems.resource_not_permitted(ground.subject.where, refused) if refused else None


def _taken(subject: Subject, entry: OurEntry, why: str) -> Reason:
    place = f"{subject.where} $.spec.permittedHostDevices.{entry.part}"
    return kubevirtproblems.selector_taken(entry.resource, entry.selector, why, place)

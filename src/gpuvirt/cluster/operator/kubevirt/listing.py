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
from gpuvirt.model.devices.selectors import normal, spellings
from gpuvirt.model.reasons import Reason, kubevirtproblems


@dataclass(frozen=True, slots=True)
class Listing:
    """It."""

    desired: tuple[OurEntry, ...] = ()
    """All that is to stand there of what nodes offer, whoever has written it."""
    add: tuple[OurEntry, ...] = ()
    mend: tuple[Entry, ...] = ()
    """Entries of ours that say that KubeVirt is to offer the devices."""
    out: tuple[Entry, ...] = ()
    dissolve: bool = False
    """All lists are to go."""
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class ListingInputs:
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


def listing_of(inputs: ListingInputs) -> Listing:
    """Return what is to become of them."""
    entries = inputs.subject.entries
    if entries is None:
        return _made(inputs)
    why, out = _why_dissolved(inputs, entries), tuple(_unused(inputs, entries))
    spares = any(one.part is Part.MDEV for one in entries if one not in out) and not inputs.leaves_mdevs
    if why is not None and not spares and all(is_ours(inputs.ours, one) for one in entries):
        return Listing(dissolve=True, reasons=(why,))
    return _kept(inputs, entries, out, (why,) if why is not None else ())


def is_ours(ours: Changes, entry: Entry) -> bool:
    """Return whether we have added an entry."""
    return OurEntry(entry.part, entry.selector, entry.resource) in ours.entries


def _made(inputs: ListingInputs) -> Listing:
    desired = tuple(_desired(inputs.offered))
    if not desired:
        return Listing()
    unlisted = sorted(inputs.names.used - inputs.offered.keys())
    if inputs.names.unknown:
        return Listing(reasons=(kubevirtproblems.requests_unknown(inputs.subject.where, inputs.names.unknown),))
    if unlisted:
        return Listing(reasons=(kubevirtproblems.resource_not_permitted(inputs.subject.where, unlisted),))
    fitting, reasons = _fitting(inputs.subject, (), desired)
    if inputs.names.used - {one.resource for one in fitting}:
        return Listing(reasons=reasons)
    return Listing(desired=fitting, add=fitting, reasons=reasons)


def _kept(
    inputs: ListingInputs, entries: Sequence[Entry], out: tuple[Entry, ...], reasons: tuple[Reason, ...]
) -> Listing:
    there = {(one.part, normal(one.selector), one.resource) for one in entries if not one.disabled}
    desired = tuple(_desired(inputs.offered))
    missing = tuple(one for one in desired if (one.part, normal(one.selector), one.resource) not in there)
    add, taken = _fitting(inputs.subject, [one for one in entries if one not in out], missing)
    return Listing(
        desired=(*(one for one in desired if one not in missing), *add),
        add=add,
        mend=tuple(one for one in entries if not one.external and is_ours(inputs.ours, one)),
        out=out,
        reasons=(*reasons, *taken),
    )


def _desired(offered: Offered) -> Iterator[OurEntry]:
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


def _unused(inputs: ListingInputs, entries: Sequence[Entry]) -> Iterator[Entry]:
    if not inputs.prune or inputs.names.unknown:
        return
    busy = inputs.names.used | inputs.offered.keys() | inputs.withheld
    yield from (one for one in entries if is_ours(inputs.ours, one) and one.resource not in busy)


def _why_dissolved(inputs: ListingInputs, entries: Sequence[Entry]) -> Reason | None:
    """Return what our own lists refuse that was permitted before they were there."""
    if inputs.subject.permitted not in inputs.ours.made or inputs.names.unknown:
        return None
    listed = {one.resource for one in entries if not one.disabled}
    refused = sorted(inputs.names.used - listed - inputs.offered.keys())
    return kubevirtproblems.resource_not_permitted(inputs.subject.where, refused) if refused else None


def _taken(subject: Subject, entry: OurEntry, why: str) -> Reason:
    place = f"{subject.where} $.spec.permittedHostDevices.{entry.part}"
    return kubevirtproblems.selector_taken(entry.resource, entry.selector, why, place)

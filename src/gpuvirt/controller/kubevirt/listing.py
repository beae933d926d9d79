"""The desired lists of permitted devices.

Four rules ensure that KubeVirt refuses no VM that could have run before, and that no tenant decides what is permitted:

- Without lists KubeVirt permits every device. So gpuvirt creates lists only if they can name all resources that VMs
  request and can get: a node has the resource, or a VM on a node uses it. Other requested names do not count, since any
  tenant can request any name.
- gpuvirt removes an entry only if it added the entry and no object names the resource.
- gpuvirt does not change the entries of other writers.
- gpuvirt never removes lists because of a request. It reports the resources that VMs request and its lists refuse.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.controller.kubevirt.changes import DeviceList, OurChanges, OurEntry
from gpuvirt.controller.kubevirt.offered import Names, Offered
from gpuvirt.controller.kubevirt.subject import PermittedEntry, PermittingObject
from gpuvirt.model.devices.candidates import normal, spellings
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, clusterproblems
from gpuvirt.model.reasons.clusterproblems import shortened


class ListChanges(msgspec.Struct, frozen=True):
    """The desired lists, and the changes that lead to them."""

    desired: tuple[OurEntry, ...] = ()
    """The desired entries for the resources that nodes offer, also those that other writers have added."""
    add: tuple[OurEntry, ...] = ()
    mend: tuple[PermittedEntry, ...] = ()
    """gpuvirt's entries that have lost `externalResourceProvider: true`."""
    out: tuple[PermittedEntry, ...] = ()
    """Entries to remove."""
    reasons: tuple[Reason, ...] = ()


class ListingInputs(msgspec.Struct, frozen=True):
    """The inputs from which the lists follow."""

    subject: PermittingObject
    ours: OurChanges
    offered: Offered
    """The resources to list: those of nodes, without those that KubeVirt itself offers by another writer's entry."""
    names: Names
    prune: bool = False
    """Whether gpuvirt's entries are removed once no node offers their resources."""
    withheld: frozenset[str] = msgspec.field(default_factory=frozenset)
    """The resources that KubeVirt itself offers."""
    gated: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    """The resources of nodes whose entry KubeVirt would refuse VMs by, with the reason. They get no entry."""


def listing_of(inputs: ListingInputs) -> ListChanges:
    """Return the desired lists."""
    entries = inputs.subject.entries
    if entries is None:
        return _created(inputs)
    return _kept(inputs, entries, tuple(_unused(inputs, entries)))


def is_ours(ours: OurChanges, entry: PermittedEntry) -> bool:
    """Return whether gpuvirt has added an entry."""
    return entry.as_ours() in ours.entries


def _created(inputs: ListingInputs) -> ListChanges:
    desired = tuple(_desired(inputs.offered))
    gated = tuple(inputs.gated.values())
    if not desired:
        return ListChanges(reasons=gated)
    usable = inputs.names.usable({*inputs.offered, *inputs.gated})
    unlisted = usable - inputs.offered.keys() - inputs.gated.keys()
    if inputs.names.unknown:
        return ListChanges(
            reasons=(
                clusterproblems.state_unknown(
                    inputs.subject.where,
                    "gets no list of permitted devices until all requests of VMs are known; not read yet:"
                    f" {', '.join(inputs.names.unknown)}",
                    f"{clusterproblems.NOTHING_NEEDED} let the controller list these kinds",
                ),
            )
        )
    if unlisted:
        return ListChanges(reasons=(_not_permitted(inputs.subject.where, unlisted, has_list=False),))
    fitting, reasons = _fitting(inputs.subject, (), desired)
    listed = {entry.resource for entry in fitting}
    if usable - listed:
        return ListChanges(reasons=(*reasons, *gated))
    return ListChanges(desired=fitting, add=fitting, reasons=(*reasons, *gated, *_refused(inputs, listed)))


def _kept(inputs: ListingInputs, entries: Sequence[PermittedEntry], out: tuple[PermittedEntry, ...]) -> ListChanges:
    present = {_identity(entry) for entry in entries if not entry.disabled}
    desired = tuple(_desired(inputs.offered))
    missing = tuple(entry for entry in desired if _identity(entry) not in present)
    add, taken = _fitting(inputs.subject, [entry for entry in entries if entry not in out], missing)
    listed = {entry.resource for entry in entries if not entry.disabled}
    is_ours_alone = inputs.subject.permitted in inputs.ours.made
    return ListChanges(
        desired=(*(entry for entry in desired if entry not in missing), *add),
        add=add,
        mend=tuple(entry for entry in entries if not entry.external and is_ours(inputs.ours, entry)),
        out=out,
        reasons=(*taken, *inputs.gated.values(), *(_refused(inputs, listed) if is_ours_alone else ())),
    )


def _refused(inputs: ListingInputs, listed: Collection[str]) -> Iterator[Reason]:
    """Yield the reason with the requested names that lists of gpuvirt's refuse."""
    refused = inputs.names.used - inputs.offered.keys() - inputs.gated.keys() - set(listed)
    if refused and not inputs.names.unknown:
        yield _not_permitted(inputs.subject.where, refused, has_list=True)


def _desired(offered: Offered) -> Iterator[OurEntry]:
    for name, selectors in offered.items():
        yield from (OurEntry(DeviceList.PCI, selector, name) for selector in selectors.pci)
        yield from (OurEntry(DeviceList.MDEV, selector, name) for selector in selectors.mdev)


def _identity(entry: PermittedEntry | OurEntry) -> tuple[DeviceList, str, str]:
    """Return what two spellings of one entry have in common."""
    return entry.part, normal(entry.selector), entry.resource


def _fitting(
    subject: PermittingObject, entries: Sequence[PermittedEntry], missing: Sequence[OurEntry]
) -> tuple[tuple[OurEntry, ...], tuple[Reason, ...]]:
    """Return the entries that can be added, and why the others cannot.

    HCO's lists accept each spelling of a selector once, although all vGPU types of a card's VFs have the same PCI id.
    """
    if not subject.is_hco:
        return tuple(missing), ()
    disabled = {_identity(entry) for entry in entries if entry.disabled}
    taken = {(entry.part, entry.selector) for entry in entries}
    fitting: list[OurEntry] = []
    reasons: list[Reason] = []
    for entry in missing:
        free = (spelling for spelling in spellings(entry.selector) if (entry.part, spelling) not in taken)
        if _identity(entry) in disabled:
            reasons.append(_taken(subject, entry, "is disabled"))
        elif (selector := next(free, None)) is None:
            reasons.append(_taken(subject, entry, "is used by other resource names in all its spellings"))
        else:
            taken.add((entry.part, selector))
            fitting.append(OurEntry(entry.part, selector, entry.resource))
    return tuple(fitting), tuple(reasons)


def _unused(inputs: ListingInputs, entries: Sequence[PermittedEntry]) -> Iterator[PermittedEntry]:
    if not inputs.prune or inputs.names.unknown:
        return
    busy = inputs.names.used | inputs.offered.keys() | inputs.gated.keys() | inputs.withheld
    yield from (entry for entry in entries if is_ours(inputs.ours, entry) and entry.resource not in busy)


def _taken(subject: PermittingObject, entry: OurEntry, why: str) -> Reason:
    place = f"{subject.where} $.spec.permittedHostDevices.{entry.part}"
    return Reason(
        ReasonCode.SELECTOR_TAKEN,
        entry.resource,
        f"can't be permitted: its entry, or its selector {entry.selector!r}, {why}, and HCO accepts each selector only"
        " once",
        (Seen(place),),
        "give the entry this name, or enable it; or have nodes offer the devices under one name",
    )


def _not_permitted(where: str, names: Collection[str], *, has_list: bool) -> Reason:
    """A tenant can request any name; that must not decide what is permitted. A list refuses what it lacks."""
    message = (
        f"refuses VMs with {shortened(names)}, which they request and permittedHostDevices lacks; the list stays, since"
        " without it every device would be permitted"
    )
    fix = "if VMs may have the resource, add an entry for it to permittedHostDevices; otherwise correct the requests"
    if not has_list:
        message = (
            f"gets no list of permitted devices, since gpuvirt can't name {shortened(names)} in it: VMs request these,"
            " and other programs offer them; without a list every device is permitted"
        )
        fix = "write permittedHostDevices yourself, with an entry for each of them; gpuvirt then adds what it offers"
    return Reason(ReasonCode.RESOURCE_NOT_PERMITTED, where, message, fix=fix)

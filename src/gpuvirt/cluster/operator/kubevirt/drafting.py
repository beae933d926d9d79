"""The patch that brings an object to what it is to be, with the annotation that says what of it we have done."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.cluster.operator.kubevirt.changes import ANNOTATION, Changes, OurEntry, Part, Switch, text_of
from gpuvirt.cluster.operator.kubevirt.listing import Listing
from gpuvirt.cluster.operator.kubevirt.mediated import Handling, holds
from gpuvirt.cluster.operator.kubevirt.operations import Draft, Operation, annotate, at
from gpuvirt.cluster.operator.kubevirt.subject import MEDIATED, Entry, Subject
from gpuvirt.model.devices.selectors import normal
from gpuvirt.plain import Plain

MDEVS_LEFT_ALONE = "mediated devices are left alone"


@dataclass(frozen=True, slots=True)
class Due:
    """What it is to be."""

    listing: Listing
    gates: tuple[str, ...] = ()
    """Gates that are to be on."""
    handling: Handling | None = None
    """Who handles mediated devices; None where no node has any, nor will."""

    @property
    def items(self) -> tuple[str, ...]:
        """All that is wanted, whether or not it is there, each as one word for it."""
        mdevs = (MDEVS_LEFT_ALONE,) if self.handling is not None and self.handling.will_be_off else ()
        return (*(_item(one) for one in self.listing.desired), *self.gates, *mdevs)

    def lacking(self, subject: Subject) -> tuple[str, ...]:
        """Return what of that is not there."""
        mended = (OurEntry(one.part, one.selector, one.resource) for one in self.listing.mend)
        handling = self.handling
        mdevs = (MDEVS_LEFT_ALONE,) if handling is not None and handling.will_be_off and not handling.off else ()
        gates = (gate for gate in self.gates if gate not in subject.gates)
        return (*(_item(one) for one in (*self.listing.add, *mended)), *gates, *mdevs)


def drafted(subject: Subject, ours: Changes, due: Due) -> tuple[Operation, ...]:
    """Return the operations; none where nothing is lacking."""
    draft, listing, handling = Draft(subject.there), due.listing, due.handling
    if listing.dissolve:
        draft.remove(subject.permitted)
    for entry in listing.mend:
        draft.set(f"{pointer_to(subject, entry)}/externalResourceProvider", value=True)
    for part in (Part.PCI, Part.MDEV):
        draft.take_out(f"{subject.permitted}/{part}", (one.index for one in listing.out if one.part is part))
    for one in listing.add:
        draft.append(f"{subject.permitted}/{one.part}", _written(subject, one))
    gates = [gate for gate in (*due.gates, *_mdev_gate(due)) if gate not in subject.gates]
    for gate in gates:
        draft.append(subject.gates_pointer, gate)
    if handling is not None and handling.switch is not None:
        draft.need(handling.switch.pointer.rpartition("/")[0], {})
        draft.set(handling.switch.pointer, handling.switch.value)
    after = Changes(
        entries=tuple(_entries(subject, ours, listing)),
        gates=tuple(dict.fromkeys((*(one for one in ours.gates if one in subject.gates), *gates))),
        switch=(handling.switch if handling is not None else None) or _kept_switch(subject, ours),
        made=tuple(_made(subject, ours, draft, listing)),
    )
    annotate(draft, subject.metadata.annotations, ANNOTATION, text_of(after))
    return draft.operations


def pointer_to(subject: Subject, entry: Entry) -> str:
    """Return the pointer to an entry."""
    return f"{subject.permitted}/{entry.part}/{entry.index}"


def removable(subject: Subject) -> tuple[str, ...]:
    """Return the containers of which all that may be in them is known, innermost first."""
    lists = (f"{subject.permitted}/{part}" for part in (Part.PCI, Part.MDEV))
    return (*lists, subject.permitted, subject.gates_pointer, f"{subject.root}{at(MEDIATED)}")


def _item(entry: OurEntry) -> str:
    return f"{entry.part} {normal(entry.selector)} {entry.resource}"


def _written(subject: Subject, entry: OurEntry) -> dict[str, Plain]:
    key = subject.pci_key if entry.part is Part.PCI else "mdevNameSelector"
    return {key: entry.selector, "resourceName": entry.resource, "externalResourceProvider": True}


def _mdev_gate(due: Due) -> tuple[str, ...]:
    return (due.handling.gate,) if due.handling is not None and due.handling.gate is not None else ()


def _entries(subject: Subject, ours: Changes, listing: Listing) -> Iterator[OurEntry]:
    """Yield the entries that are ours after the patch; one that somebody took out is no longer."""
    gone = {(one.part, one.index) for one in listing.out}
    there = {
        OurEntry(one.part, one.selector, one.resource)
        for one in subject.entries or ()
        if not listing.dissolve and (one.part, one.index) not in gone
    }
    yield from (one for one in ours.entries if one in there)
    yield from (one for one in listing.add if one not in ours.entries or one not in there)


def _kept_switch(subject: Subject, ours: Changes) -> Switch | None:
    return ours.switch if ours.switch is not None and holds(subject, ours.switch) else None


def _made(subject: Subject, ours: Changes, draft: Draft, listing: Listing) -> Iterator[str]:
    within = f"{subject.permitted}/"
    for pointer in removable(subject):
        if listing.dissolve and (pointer == subject.permitted or pointer.startswith(within)):
            continue
        if pointer in draft.made or (pointer in ours.made and pointer in subject.there):
            yield pointer

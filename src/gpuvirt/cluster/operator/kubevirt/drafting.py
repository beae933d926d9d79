"""The patch that leads a KubeVirt or HyperConverged to the desired configuration and records gpuvirt's changes."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.cluster.jsonpatch import Draft, Operation, annotate, at
from gpuvirt.cluster.operator.kubevirt.changes import ANNOTATION, Changes, OurEntry, Part, Switch, text_of
from gpuvirt.cluster.operator.kubevirt.listing import Listing
from gpuvirt.cluster.operator.kubevirt.mediated import Handling, holds
from gpuvirt.cluster.operator.kubevirt.subject import MEDIATED, Entry, Subject
from gpuvirt.model.devices.selectors import normal
from gpuvirt.plain import Plain

MDEVS_LEFT_ALONE = "mediated devices are left alone"
"""An item of `DesiredConfiguration.items`, which the histories on disk have."""


@dataclass(frozen=True, slots=True)
class DesiredConfiguration:
    """The desired configuration of a subject."""

    listing: Listing
    gates: tuple[str, ...] = ()
    """Feature gates that have to be enabled."""
    handling: Handling | None = None
    """Whether KubeVirt handles mediated devices; None if no node has any or will have any."""

    @property
    def items(self) -> tuple[str, ...]:
        """All desired items, present or missing, one text each."""
        mdevs = (MDEVS_LEFT_ALONE,) if self.handling is not None and self.handling.will_be_off else ()
        return (*(_item(entry) for entry in self.listing.desired), *self.gates, *mdevs)

    def lacking(self, subject: Subject) -> tuple[str, ...]:
        """Return the desired items that a subject lacks."""
        mended = (entry.as_ours() for entry in self.listing.mend)
        handling = self.handling
        mdevs = (MDEVS_LEFT_ALONE,) if handling is not None and handling.will_be_off and not handling.off else ()
        gates = (gate for gate in self.gates if gate not in subject.gates)
        return (*(_item(entry) for entry in (*self.listing.add, *mended)), *gates, *mdevs)


def drafted(subject: Subject, ours: Changes, desired: DesiredConfiguration) -> tuple[Operation, ...]:
    """Return the operations of the patch; none if nothing is missing."""
    draft, listing, handling = Draft(subject.containers), desired.listing, desired.handling
    for entry in listing.mend:
        draft.set(f"{pointer_to(subject, entry)}/externalResourceProvider", value=True)
    for part in (Part.PCI, Part.MDEV):
        indices = (entry.index for entry in listing.out if entry.part is part)
        draft.remove_entries(f"{subject.permitted}/{part}", indices)
    for added in listing.add:
        draft.append(f"{subject.permitted}/{added.part}", _entry_value(subject, added))
    gates = [gate for gate in (*desired.gates, *_mdev_gate(desired)) if gate not in subject.gates]
    for gate in gates:
        draft.append(subject.gates_pointer, gate)
    if handling is not None and handling.switch is not None:
        draft.ensure(handling.switch.pointer.rpartition("/")[0], {})
        draft.set(handling.switch.pointer, handling.switch.value)
    after = Changes(
        entries=tuple(_entries(subject, ours, listing)),
        gates=tuple(dict.fromkeys((*(gate for gate in ours.gates if gate in subject.gates), *gates))),
        switch=(handling.switch if handling is not None else None) or _kept_switch(subject, ours),
        made=tuple(_created_containers(subject, ours, draft)),
    )
    annotate(draft, subject.metadata.annotations, ANNOTATION, text_of(after))
    return draft.operations


def pointer_to(subject: Subject, entry: Entry) -> str:
    """Return the JSON pointer to an entry."""
    return f"{subject.permitted}/{entry.part}/{entry.index}"


def removable(subject: Subject) -> tuple[str, ...]:
    """Return the objects and lists that gpuvirt may remove if it created them, innermost first."""
    lists = (f"{subject.permitted}/{part}" for part in (Part.PCI, Part.MDEV))
    return (*lists, subject.permitted, subject.gates_pointer, f"{subject.root}{at(MEDIATED)}")


def _item(entry: OurEntry) -> str:
    return f"{entry.part} {normal(entry.selector)} {entry.resource}"


def _entry_value(subject: Subject, entry: OurEntry) -> dict[str, Plain]:
    key = subject.pci_key if entry.part is Part.PCI else "mdevNameSelector"
    return {key: entry.selector, "resourceName": entry.resource, "externalResourceProvider": True}


def _mdev_gate(desired: DesiredConfiguration) -> tuple[str, ...]:
    handling = desired.handling
    return (handling.gate,) if handling is not None and handling.gate is not None else ()


def _entries(subject: Subject, ours: Changes, listing: Listing) -> Iterator[OurEntry]:
    """Yield gpuvirt's entries after the patch, without those that another writer has removed."""
    removed = {(entry.part, entry.index) for entry in listing.out}
    present = {entry.as_ours() for entry in subject.entries or () if (entry.part, entry.index) not in removed}
    yield from (entry for entry in ours.entries if entry in present)
    yield from (entry for entry in listing.add if entry not in ours.entries or entry not in present)


def _kept_switch(subject: Subject, ours: Changes) -> Switch | None:
    return ours.switch if ours.switch is not None and holds(subject, ours.switch) else None


def _created_containers(subject: Subject, ours: Changes, draft: Draft) -> Iterator[str]:
    for pointer in removable(subject):
        if pointer in draft.made or (pointer in ours.made and pointer in subject.containers):
            yield pointer

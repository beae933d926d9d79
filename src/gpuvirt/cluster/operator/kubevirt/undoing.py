"""How to take back what we have written, and no more than that; what machines still need of it stays.

Source of the one danger: a KubeVirt that handles mediated devices again deletes those that it did not make, whoever
uses them. So nothing that keeps it from that goes while a machine asks for one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.cluster.operator.kubevirt.changes import ANNOTATION, Changes, OurEntry, Part, changes_of, text_of
from gpuvirt.cluster.operator.kubevirt.listing import is_ours
from gpuvirt.cluster.operator.kubevirt.mediated import handling_of, holds
from gpuvirt.cluster.operator.kubevirt.offered import selects
from gpuvirt.cluster.operator.kubevirt.operations import Draft, Operation, annotate, at, conditional
from gpuvirt.cluster.operator.kubevirt.scene import KubeVirtPicture, subject_of
from gpuvirt.cluster.operator.kubevirt.subject import MEDIATED, Entry, Subject
from gpuvirt.cluster.operator.kubevirt.versions import GPU, HOST_DEVICES
from gpuvirt.cluster.resources import Resource
from gpuvirt.model.doctor.checks.kubevirt import MDEV_GATE
from gpuvirt.model.reasons import Reason, kubevirtproblems


@dataclass(frozen=True, slots=True)
class Undoing:
    """How to take it back."""

    resource: Resource | None = None
    """The collection of the object to be patched; None where it is not known which."""
    name: str = ""
    patch: tuple[Operation, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """What stays, and why."""


@dataclass(frozen=True, slots=True)
class _UndoInputs:
    picture: KubeVirtPicture
    subject: Subject
    ours: Changes

    def is_named(self, resource: str) -> bool:
        """Return whether a machine asks for a resource; where that was not heard, one may."""
        return bool(self.picture.names.unknown) or resource in self.picture.names.used

    def is_needed(self, entry: Entry) -> bool:
        """Return whether a machine asks for what an entry permits, or for mediated devices that it spares."""
        spares = (
            name
            for name, selectors in self.picture.offered.items()
            if entry.part is Part.MDEV and selects(entry, selectors)
        )
        return self.is_named(entry.resource) or any(self.is_named(name) for name in spares)

    @property
    def mdevs_named(self) -> bool:
        """Whether a machine asks for mediated devices that we know of."""
        listed = {one.resource for one in self.subject.entries or () if one.part is Part.MDEV}
        offered = {name for name, selectors in self.picture.offered.items() if selectors.mdev}
        known = listed | offered | {one.resource for one in self.ours.entries if one.part is Part.MDEV}
        switches = self.ours.switch is not None or MDEV_GATE in self.ours.gates
        return any(self.is_named(one) for one in known) or (switches and bool(self.picture.names.unknown))

    @property
    def all_ours(self) -> bool:
        """Whether the lists have nothing that we have not added, and were not there before."""
        return self.subject.permitted in self.ours.made and all(
            is_ours(self.ours, one) for one in self.subject.entries or ()
        )


def undo(picture: KubeVirtPicture) -> Undoing:
    """Return how to take back what was done to a KubeVirt, or to the HyperConverged that owns it."""
    subject = subject_of(picture)
    if isinstance(subject, Reason):
        return Undoing(reasons=(subject,))
    inputs = _UndoInputs(picture, subject, changes_of(subject.metadata.annotations))
    draft = Draft(subject.there)
    entries = _take_entries(inputs, draft)
    gates = _take_gates(inputs, draft)
    switch_stays = _take_switch(inputs, draft)
    left = Changes(
        entries=entries,
        gates=gates,
        switch=inputs.ours.switch if switch_stays else None,
        made=tuple(one for one in inputs.ours.made if one in subject.there and draft.has(one)),
    )
    if not (left.entries or left.gates or left.switch):
        left = Changes()
    annotate(draft, subject.metadata.annotations, ANNOTATION, text_of(left))
    patch = conditional(subject.metadata.resource_version, draft.operations)
    return Undoing(subject.resource, subject.metadata.name, patch, tuple(_stays(subject, left)))


def _take_entries(inputs: _UndoInputs, draft: Draft) -> tuple[OurEntry, ...]:
    """Take entries out; return those that stay."""
    subject, ours = inputs.subject, inputs.ours
    if subject.entries is None:
        return ()
    own = [one for one in subject.entries if is_ours(ours, one)]
    # Without any list everything is permitted, so that no name is in the way; a list may be what spares devices.
    spared = handling_of(subject, inputs.picture.version).off or not any(one.part is Part.MDEV for one in own)
    if inputs.all_ours and (spared or not inputs.mdevs_named):
        draft.remove(subject.permitted)
        return ()
    going = [one for one in own if not inputs.is_needed(one)]
    for part in (Part.PCI, Part.MDEV):
        pointer = f"{subject.permitted}/{part}"
        entries = [one for one in subject.entries if one.part is part]
        indices = [one.index for one in going if one.part is part]
        if indices and len(indices) == len(entries) and pointer in ours.made:
            draft.remove(pointer)
        else:
            draft.take_out(pointer, indices)
    return tuple(_as_ours(one) for one in own if one not in going)


def _as_ours(entry: Entry) -> OurEntry:
    return OurEntry(entry.part, entry.selector, entry.resource)


def _take_gates(inputs: _UndoInputs, draft: Draft) -> tuple[str, ...]:
    """Take gates out, one of each that somebody else has added too; return those that stay."""
    subject, names = inputs.subject, inputs.picture.names
    needed = {
        GPU: bool(names.gpus or names.unknown),
        HOST_DEVICES: bool(names.host_devices or names.unknown),
        MDEV_GATE: inputs.mdevs_named,
    }
    own = [one for one in inputs.ours.gates if one in subject.gates]
    going = [one for one in own if not needed.get(one, True)]
    if going and len(going) == len(subject.gates) and subject.gates_pointer in inputs.ours.made:
        draft.remove(subject.gates_pointer)
    else:
        draft.take_out(subject.gates_pointer, (subject.gates.index(one) for one in going))
    return tuple(one for one in own if one not in going)


def _take_switch(inputs: _UndoInputs, draft: Draft) -> bool:
    """Set the field back that says who handles mediated devices; return whether it stays as we have set it."""
    subject, switch = inputs.subject, inputs.ours.switch
    if switch is None or not holds(subject, switch):
        return False
    if inputs.mdevs_named:
        return True
    mediated = f"{subject.root}{at(MEDIATED)}"
    if switch.was is not None:
        draft.set(switch.pointer, switch.was)
    elif mediated in inputs.ours.made and switch.pointer.startswith(f"{mediated}/") and not subject.mediated.makes_own:
        draft.remove(mediated)
    else:
        draft.remove(switch.pointer)
    return False


def _stays(subject: Subject, left: Changes) -> Iterator[Reason]:
    what = [f"the entry {one.resource}" for one in left.entries]
    what += [f"the gate {one}" for one in left.gates]
    what += [left.switch.pointer] if left.switch is not None else []
    if what:
        yield kubevirtproblems.still_referenced(subject.where, what)

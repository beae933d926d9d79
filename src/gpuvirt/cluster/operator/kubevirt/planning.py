"""What is to be written so that KubeVirt permits what nodes offer, and leaves it to them: a patch, and reasons.

One step leads there from anywhere, and a second one is none. The patch names the version that it was decided by; where
the object has another by then, nothing of it is done, and the next decision is made from what stands there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.cluster.kinds.gpunode import Withheld
from gpuvirt.cluster.operator.kubevirt import history as histories
from gpuvirt.cluster.operator.kubevirt.changes import MANAGE_ANNOTATION, Changes, Part, changes_of
from gpuvirt.cluster.operator.kubevirt.drafting import Due, drafted
from gpuvirt.cluster.operator.kubevirt.history import MOST_REVERTS, History
from gpuvirt.cluster.operator.kubevirt.listing import ListingInputs, is_ours, listing_of
from gpuvirt.cluster.operator.kubevirt.mediated import handling_of
from gpuvirt.cluster.operator.kubevirt.offered import ByKubeVirt, selects
from gpuvirt.cluster.operator.kubevirt.operations import Op, Operation, conditional
from gpuvirt.cluster.operator.kubevirt.scene import KubeVirtPicture, subject_of, withheld
from gpuvirt.cluster.operator.kubevirt.subject import Subject
from gpuvirt.cluster.operator.kubevirt.versions import gates_needed
from gpuvirt.cluster.resources import Metadata, Resource
from gpuvirt.model.devices.selectors import normal
from gpuvirt.model.reasons import Reason, kubevirtproblems


@dataclass(frozen=True, slots=True)
class Manner:
    """How it is done."""

    manage: bool = True
    """Whether anything is written; what would be is said all the same."""
    prune: bool = False
    """Whether entries of ours go that no node offers and nothing names; else they stay, for a node may be away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done about one KubeVirt."""

    history: History
    """To be kept before the patch is sent."""
    resource: Resource | None = None
    """The collection of the object to be patched; None where it is not known which."""
    name: str = ""
    patch: tuple[Operation, ...] = ()
    """What it lacks; empty where that is nothing."""
    dry_run: bool = False
    """The patch is not to be sent."""
    reasons: tuple[Reason, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    """What agents are not to offer, as their GpuNodes' specs say it."""
    stops_vgpu_changes: bool = False
    """No vGPUs are to be made: what they need was taken back too often, or KubeVirt would delete them."""
    desired: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[Operation, ...]:
        """The patch to be sent; empty for none."""
        return () if self.dry_run else self.patch

    @property
    def changes(self) -> tuple[str, ...]:
        """What the patch changes, a line each: without what it but tests."""
        return tuple(one.text for one in self.patch if one.op is not Op.TEST)

    def landed(self, metadata: Metadata) -> History:
        """Return the history after the patch was taken; `metadata` is that of the answer."""
        return histories.landed(self.history, metadata, self.desired)


def plan(picture: KubeVirtPicture, manner: Manner, history: History, at: datetime) -> Plan:
    """Return what is to be done about a KubeVirt; `history` is that of the plan before."""
    subject = subject_of(picture)
    if isinstance(subject, Reason):
        held_back = withheld(picture, None)
        return Plan(history, reasons=(subject, *_reasons(held_back)), withheld=_withheld(held_back))
    ours, held_back = changes_of(subject.metadata.annotations), withheld(picture, subject)
    due, reasons = _due(picture, manner, subject, ours, held_back)
    patch = conditional(subject.metadata.resource_version, drafted(subject, ours, due))
    managed, stale = manner.manage and not picture.is_opted_out, history.is_of_later(subject.metadata)
    if managed and not stale:
        history = histories.step(history, subject.metadata, due.items, due.lacking(subject), at)
    dry_run = not managed or history.stopped
    if patch and not managed:
        reasons = (*reasons, kubevirtproblems.not_managed(subject.where, MANAGE_ANNOTATION))
    if patch and history.stopped:
        reasons = (*reasons, kubevirtproblems.config_reverted(subject.where, MOST_REVERTS))
    risk = _risk(picture, subject, due, written=not dry_run)
    return Plan(
        history,
        subject.resource,
        subject.metadata.name,
        () if stale else patch,
        dry_run,
        (*reasons, *_reasons(held_back), *((risk,) if risk is not None else ())),
        _withheld(held_back),
        stops_vgpu_changes=risk is not None or (managed and bool(patch) and history.stopped),
        desired=due.items,
    )


def _reasons(held_back: Mapping[str, ByKubeVirt]) -> tuple[Reason, ...]:
    return tuple(one.reason for one in held_back.values())


def _withheld(held_back: Mapping[str, ByKubeVirt]) -> tuple[Withheld, ...]:
    return tuple(one.withheld for one in held_back.values())


def _due(
    picture: KubeVirtPicture, manner: Manner, subject: Subject, ours: Changes, held_back: Mapping[str, ByKubeVirt]
) -> tuple[Due, tuple[Reason, ...]]:
    """Return what the object is to become, and what can't be."""
    handling = handling_of(subject, picture.version)
    foreign = [one for one in (*picture.effective, *(subject.entries or ())) if not is_ours(ours, one)]
    own = [one for one in foreign if not one.external and not one.disabled]
    offered = {
        name: selectors
        for name, selectors in picture.offered.items()
        if not any(one.resource == name or selects(one, selectors) for one in own)
    }
    off = handling.off or (picture.mdevs and handling.will_be_off)
    listing = listing_of(ListingInputs(subject, ours, offered, picture.names, off, manner.prune, frozenset(held_back)))
    needed = gates_needed(subject, picture.version, picture.offered, picture.names)
    missing = [gate for gate in needed if gate not in subject.gates]
    denied = [gate for gate in missing if gate in subject.disabled_gates]
    due = Due(
        listing,
        gates=tuple(gate for gate in needed if gate not in denied),
        handling=handling if picture.mdevs else None,
    )
    reasons = (*listing.reasons, *(kubevirtproblems.gate_disabled(subject.where, gate) for gate in denied))
    return due, (*reasons, *(handling.reasons if picture.mdevs else ()))


def _risk(picture: KubeVirtPicture, subject: Subject, due: Due, *, written: bool) -> Reason | None:
    """Return which mediated devices KubeVirt would delete, as things stand and with what is written now."""
    handling = due.handling
    if handling is None or handling.off or (handling.will_be_off and written):
        return None
    listed = (one for one in (*picture.effective, *(subject.entries or ())) if one.external and not one.disabled)
    spared = {normal(one.selector) for one in listed if one.part is Part.MDEV}
    spared |= {normal(one.selector) for one in due.listing.add if written and one.part is Part.MDEV}
    types = {one for selectors in picture.offered.values() for one in selectors.mdev if normal(one) not in spared}
    return kubevirtproblems.mdev_deletion_risk(subject.where, types) if types else None

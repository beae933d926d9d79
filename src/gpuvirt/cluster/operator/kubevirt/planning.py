"""The patch by which KubeVirt permits the devices that nodes offer and does not offer them itself, with reasons.

One patch leads from any configuration to the desired one, and a second plan has no patch. A patch names the resource
version that it was planned for. If the object has another by then, the API server refuses it, and the controller plans
again from the newer object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.cluster.jsonpatch import Op, Operation, conditional
from gpuvirt.cluster.kinds.gpunode import Withheld
from gpuvirt.cluster.operator.kubevirt import history as histories
from gpuvirt.cluster.operator.kubevirt.changes import MANAGE_ANNOTATION, Changes, Part, changes_of
from gpuvirt.cluster.operator.kubevirt.drafting import DesiredConfiguration, drafted
from gpuvirt.cluster.operator.kubevirt.history import MOST_REVERTS, History
from gpuvirt.cluster.operator.kubevirt.listing import ListingInputs, is_ours, listing_of
from gpuvirt.cluster.operator.kubevirt.mediated import handling_of, second_owner
from gpuvirt.cluster.operator.kubevirt.offered import ByKubeVirt, Offered, selects
from gpuvirt.cluster.operator.kubevirt.picture import KubeVirtPicture, subject_of, withheld
from gpuvirt.cluster.operator.kubevirt.subject import Subject
from gpuvirt.cluster.operator.kubevirt.versions import gates_needed
from gpuvirt.cluster.resources import Metadata, Resource
from gpuvirt.model.devices.selectors import normal
from gpuvirt.model.doctor.gracegpus import is_grace, missing_gates
from gpuvirt.model.reasons import Reason, kubevirtproblems


@dataclass(frozen=True, slots=True)
class Manner:
    """The options of a plan."""

    manage: bool = True
    """Whether the patch is sent; if not, the plan only reports it."""
    prune: bool = False
    """Whether to remove gpuvirt's entries that no node offers and no object names. A node may be away for a while."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one KubeVirt."""

    history: History
    """The new history, which is stored before the patch is sent."""
    resource: Resource | None = None
    """The collection of the object to patch; None if that object is unknown."""
    name: str = ""
    patch: tuple[Operation, ...] = ()
    """The operations of the patch; empty if nothing is missing."""
    dry_run: bool = False
    """Whether the patch is only reported, and not sent."""
    reasons: tuple[Reason, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    """The resources that agents must not offer, as entries of their GpuNodes' specs."""
    stops_vgpu_changes: bool = False
    """Whether agents must not create vGPUs: the patch was reverted too often, or KubeVirt would delete them."""
    desired: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[Operation, ...]:
        """The patch to send; empty for none."""
        return () if self.dry_run else self.patch

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes of the patch, one line each, without its tests."""
        return tuple(operation.text for operation in self.patch if operation.op is not Op.TEST)

    def landed(self, metadata: Metadata) -> History:
        """Return the history after the patch; `metadata` is that of the patched object."""
        return histories.landed(self.history, metadata, self.desired)


def plan(picture: KubeVirtPicture, manner: Manner, history: History, at: datetime) -> Plan:
    """Return the plan for a KubeVirt; `history` is that of the previous plan."""
    subject = subject_of(picture)
    if isinstance(subject, Reason):
        by_kubevirt = withheld(picture, None)
        return Plan(history, reasons=(subject, *_reasons(by_kubevirt)), withheld=_withheld(by_kubevirt))
    ours, by_kubevirt = changes_of(subject.metadata.annotations), withheld(picture, subject)
    desired, reasons = _desired_configuration(picture, manner, subject, ours, by_kubevirt)
    patch = conditional(subject.metadata.resource_version, drafted(subject, ours, desired))
    managed, stale = manner.manage and not picture.is_opted_out, history.is_of_later(subject.metadata)
    if managed and not stale:
        history = histories.step(history, subject.metadata, desired.items, desired.lacking(subject), at)
    dry_run = not managed or history.stopped
    if patch and not managed:
        reasons = (*reasons, kubevirtproblems.not_managed(subject.where, MANAGE_ANNOTATION))
    if patch and history.stopped:
        reasons = (*reasons, kubevirtproblems.config_reverted(subject.where, MOST_REVERTS))
    risk = _risk(picture, subject, desired, written=not dry_run)
    return Plan(
        history,
        subject.resource,
        subject.metadata.name,
        () if stale else patch,
        dry_run,
        (*reasons, *_reasons(by_kubevirt), *((risk,) if risk is not None else ())),
        _withheld(by_kubevirt),
        stops_vgpu_changes=risk is not None or (managed and bool(patch) and history.stopped),
        desired=desired.items,
    )


def _reasons(by_kubevirt: Mapping[str, ByKubeVirt]) -> tuple[Reason, ...]:
    return tuple(resource.reason for resource in by_kubevirt.values())


def _withheld(by_kubevirt: Mapping[str, ByKubeVirt]) -> tuple[Withheld, ...]:
    return tuple(resource.withheld for resource in by_kubevirt.values())


def _desired_configuration(
    picture: KubeVirtPicture,
    manner: Manner,
    subject: Subject,
    ours: Changes,
    by_kubevirt: Mapping[str, ByKubeVirt],
) -> tuple[DesiredConfiguration, tuple[Reason, ...]]:
    """Return the desired configuration of a subject, and why parts of it cannot be reached."""
    handling = handling_of(subject, picture.version)
    foreign = [entry for entry in (*picture.effective, *(subject.entries or ())) if not is_ours(ours, entry)]
    own = [entry for entry in foreign if not entry.external and not entry.disabled]
    offered = {
        name: selectors
        for name, selectors in picture.offered.items()
        if not any(entry.resource == name or selects(entry, selectors) for entry in own)
    }
    gated = _gated(picture, offered)
    listed = {name: selectors for name, selectors in offered.items() if name not in gated}
    listing = listing_of(
        ListingInputs(subject, ours, listed, picture.names, manner.prune, frozenset(by_kubevirt), gated)
    )
    needed = gates_needed(subject, picture.version, picture.offered, picture.names)
    missing = [gate for gate in needed if gate not in subject.gates]
    denied = [gate for gate in missing if gate in subject.disabled_gates]
    desired = DesiredConfiguration(
        listing,
        gates=tuple(gate for gate in needed if gate not in denied),
        handling=handling if picture.mdevs else None,
    )
    second = second_owner(subject, picture.mdev_nodes) if not handling.will_be_off else None
    reasons = (*listing.reasons, *(kubevirtproblems.gate_disabled(subject.where, gate) for gate in denied))
    reasons = (*reasons, second) if second is not None else reasons
    return desired, (*reasons, *(handling.reasons if picture.mdevs else ()))


def _gated(picture: KubeVirtPicture, offered: Offered) -> Mapping[str, Reason]:
    """Return the resources of Grace GPUs while KubeVirt lacks gates for them, with the reason."""
    missing = missing_gates(picture.version, picture.gates)
    return {
        name: kubevirtproblems.grace_gates_missing(name, picture.where, missing)
        for name, selectors in offered.items()
        if missing and any(is_grace(selector) for selector in selectors.pci)
    }


def _risk(picture: KubeVirtPicture, subject: Subject, desired: DesiredConfiguration, *, written: bool) -> Reason | None:
    """Return the reason with the mediated devices that KubeVirt would delete, now and after the patch if it is sent."""
    handling = desired.handling
    if handling is None or handling.off or (handling.will_be_off and written):
        return None
    entries = (*picture.effective, *(subject.entries or ()))
    listed = (entry for entry in entries if entry.external and not entry.disabled)
    spared = {normal(entry.selector) for entry in listed if entry.part is Part.MDEV}
    spared |= {normal(entry.selector) for entry in desired.listing.add if written and entry.part is Part.MDEV}
    types = {name for selectors in picture.offered.values() for name in selectors.mdev if normal(name) not in spared}
    return kubevirtproblems.mdev_deletion_risk(subject.where, types) if types else None

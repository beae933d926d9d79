"""The patch by which KubeVirt permits the devices that nodes offer and does not offer them itself, with reasons.

One patch leads from any configuration to the desired one and records gpuvirt's changes, and a second plan has no
patch. A patch names the resource version that it was planned for. If the object has another by then, the API server
refuses it, and the controller plans again from the newer object.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

from gpuvirt.controller.kubevirt import changes as histories
from gpuvirt.controller.kubevirt.changes import (
    ANNOTATION,
    MANAGE_ANNOTATION,
    MOST_REVERTS,
    DeviceList,
    OurChanges,
    OurEntry,
    PatchHistory,
    changes_of,
    text_of,
)
from gpuvirt.controller.kubevirt.listing import ListChanges, ListingInputs, is_ours, listing_of
from gpuvirt.controller.kubevirt.mediated import Handling, gates_needed, handling_of, holds, second_owner
from gpuvirt.controller.kubevirt.offered import ByKubeVirt, Names, Offered, offered_by_kubevirt, selects
from gpuvirt.controller.kubevirt.subject import (
    MEDIATED,
    PermittedEntry,
    PermittingObject,
    entries_of,
    is_owned_by_hco,
    of_hyper_converged,
    of_kubevirt,
)
from gpuvirt.kube.jsonpatch import Draft, Op, Operation, annotate, at, conditional
from gpuvirt.kube.kinds.gpunode import Withheld
from gpuvirt.kube.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.devices.candidates import normal
from gpuvirt.model.kubevirt.kubevirt import (
    Configuration,
    DeveloperConfiguration,
    Version,
    is_grace,
    missing_gates,
    version_of,
)
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, clusterproblems


class KubeVirtPicture(msgspec.Struct, frozen=True):
    """One KubeVirt and the observed state around it."""

    kubevirt: KubeVirt
    offered: Offered
    """The resources that nodes offer; desired resources that do not exist yet may be included."""
    names: Names
    """The resource names that VMs request."""
    hyper_convergeds: Observed[tuple[HyperConverged, ...]] | None = None
    """None if not observed; `Observed(None)` if HCO is not installed."""
    mdevs: bool = False
    """Whether a node has mediated devices, or may get some."""
    mdev_nodes: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """The labels of these nodes by name."""

    @property
    def version(self) -> Version | None:
        """KubeVirt's version."""
        status = self.kubevirt.status
        return version_of(status.observed_kube_virt_version) if status is not None else None

    @property
    def where(self) -> str:
        """The KubeVirt's name in messages."""
        return f"KubeVirt {self.kubevirt.metadata.namespace}/{self.kubevirt.metadata.name}"

    @property
    def gates(self) -> frozenset[str]:
        """The feature gates that are on, by any writer; one that `disabledFeatureGates` has too is on."""
        developer = (self.kubevirt.spec.configuration or Configuration()).developer_configuration
        return frozenset((developer or DeveloperConfiguration()).feature_gates or ())

    @property
    def effective(self) -> tuple[PermittedEntry, ...]:
        """The entries that KubeVirt permits now, by any writer."""
        return entries_of((self.kubevirt.spec.configuration or Configuration()).permitted_host_devices)

    @property
    def opted_out(self) -> str | None:
        """The annotation of the KubeVirt or its HyperConverged that forbids changes: `gpuvirt.io/manage: "false"`.

        Another value than true, such as `no`, forbids them, too.
        """
        hcos = (self.hyper_convergeds.value if self.hyper_convergeds is not None else None) or ()
        owners = hcos if is_owned_by_hco(self.kubevirt) else ()
        found = (self.kubevirt.metadata, *(owner.metadata for owner in owners))
        values = (metadata.annotations.get(MANAGE_ANNOTATION, "true") for metadata in found)
        return next((f'{MANAGE_ANNOTATION}: "{value}"' for value in values if value.lower() != "true"), None)


def subject_of(picture: KubeVirtPicture) -> PermittingObject | Reason:
    """Return the object that decides what KubeVirt permits, or why it is unknown."""
    where = picture.where
    if not is_owned_by_hco(picture.kubevirt):
        return of_kubevirt(picture.kubevirt)
    if picture.hyper_convergeds is None:
        return clusterproblems.state_unknown(
            where,
            "belongs to HCO, and its HyperConverged has not been read yet; nothing is written until then",
            f"{clusterproblems.NOTHING_NEEDED} let the controller list hyperconvergeds.hco.kubevirt.io",
        )
    hcos = picture.hyper_convergeds.value or ()
    if len(hcos) != 1:
        return clusterproblems.state_unknown(
            where,
            f"belongs to HCO, which reverts the changes of others, and the cluster has {len(hcos)} HyperConvergeds;"
            " expected one",
            "keep one HyperConverged; or, where HCO is gone, remove its label and owner",
        )
    return of_hyper_converged(hcos[0])


def withheld(picture: KubeVirtPicture, subject: PermittingObject | None) -> Mapping[str, ByKubeVirt]:
    """Return the resources that agents must not offer, since KubeVirt offers them."""
    written = subject.entries or () if subject is not None and subject.is_hco else ()
    effective, where = picture.effective, picture.where

    def place(entry: PermittedEntry) -> str:
        lists = "$.spec.configuration.permittedHostDevices"
        hco = subject is not None and entry not in effective
        return f"{subject.where if hco and subject is not None else where} {lists}.{entry.part}[{entry.index}]"

    return offered_by_kubevirt((*effective, *written), picture.offered, place)


MDEVS_LEFT_ALONE = "mediated devices are left alone"
"""An item of `DesiredConfiguration.items`, which the histories on disk have."""


class DesiredConfiguration(msgspec.Struct, frozen=True):
    """The desired configuration of a subject."""

    listing: ListChanges
    gates: tuple[str, ...] = ()
    """Feature gates that have to be enabled."""
    handling: Handling | None = None
    """Whether KubeVirt handles mediated devices; None if no node has any or will have any."""

    @property
    def items(self) -> tuple[str, ...]:
        """All desired items, present or missing, one text each."""
        mdevs = (MDEVS_LEFT_ALONE,) if self.handling is not None and self.handling.will_be_off else ()
        return (*(_item(entry) for entry in self.listing.desired), *self.gates, *mdevs)

    def lacking(self, subject: PermittingObject) -> tuple[str, ...]:
        """Return the desired items that a subject lacks."""
        mended = (entry.as_ours() for entry in self.listing.mend)
        handling = self.handling
        mdevs = (MDEVS_LEFT_ALONE,) if handling is not None and handling.will_be_off and not handling.off else ()
        gates = (gate for gate in self.gates if gate not in subject.gates)
        return (*(_item(entry) for entry in (*self.listing.add, *mended)), *gates, *mdevs)


def drafted(subject: PermittingObject, ours: OurChanges, desired: DesiredConfiguration) -> tuple[Operation, ...]:
    """Return the operations of the patch; none if nothing is missing."""
    draft, listing, handling = Draft(subject.containers), desired.listing, desired.handling
    for entry in listing.mend:
        draft.set(f"{pointer_to(subject, entry)}/externalResourceProvider", value=True)
    for part in (DeviceList.PCI, DeviceList.MDEV):
        indices = (entry.index for entry in listing.out if entry.part is part)
        draft.remove_entries(f"{subject.permitted}/{part}", indices)
    for added in listing.add:
        key = subject.pci_key if added.part is DeviceList.PCI else "mdevNameSelector"
        draft.append(
            f"{subject.permitted}/{added.part}",
            {key: added.selector, "resourceName": added.resource, "externalResourceProvider": True},
        )
    mdev_gate = (handling.gate,) if handling is not None and handling.gate is not None else ()
    gates = [gate for gate in (*desired.gates, *mdev_gate) if gate not in subject.gates]
    for gate in gates:
        draft.append(subject.gates_pointer, gate)
    if handling is not None and handling.switch is not None:
        draft.ensure(handling.switch.pointer.rpartition("/")[0], {})
        draft.set(handling.switch.pointer, handling.switch.value)
    kept_switch = ours.switch if ours.switch is not None and holds(subject, ours.switch) else None
    after = OurChanges(
        entries=tuple(_entries(subject, ours, listing)),
        gates=tuple(dict.fromkeys((*(gate for gate in ours.gates if gate in subject.gates), *gates))),
        switch=(handling.switch if handling is not None else None) or kept_switch,
        made=tuple(
            pointer
            for pointer in removable(subject)
            if pointer in draft.made or (pointer in ours.made and pointer in subject.containers)
        ),
    )
    annotate(draft, subject.metadata.annotations, ANNOTATION, text_of(after))
    return draft.operations


def pointer_to(subject: PermittingObject, entry: PermittedEntry) -> str:
    """Return the JSON pointer to an entry."""
    return f"{subject.permitted}/{entry.part}/{entry.index}"


def removable(subject: PermittingObject) -> tuple[str, ...]:
    """Return the objects and lists that gpuvirt may remove if it created them, innermost first."""
    lists = (f"{subject.permitted}/{part}" for part in (DeviceList.PCI, DeviceList.MDEV))
    return (*lists, subject.permitted, subject.gates_pointer, f"{subject.root}{at(MEDIATED)}")


def _item(entry: OurEntry) -> str:
    return f"{entry.part} {normal(entry.selector)} {entry.resource}"


def _entries(subject: PermittingObject, ours: OurChanges, listing: ListChanges) -> Iterator[OurEntry]:
    """Yield gpuvirt's entries after the patch, without those that another writer has removed."""
    removed = {(entry.part, entry.index) for entry in listing.out}
    present = {entry.as_ours() for entry in subject.entries or () if (entry.part, entry.index) not in removed}
    yield from (entry for entry in ours.entries if entry in present)
    yield from (entry for entry in listing.add if entry not in ours.entries or entry not in present)


class Manner(msgspec.Struct, frozen=True):
    """The options of a plan."""

    manage: bool = True
    """Whether the patch is sent; if not, the plan only reports it."""
    prune: bool = False
    """Whether to remove gpuvirt's entries that no node offers and no object names. A node may be away for a while."""


class KubeVirtPlan(msgspec.Struct, frozen=True):
    """The plan for one KubeVirt."""

    history: PatchHistory
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

    def landed(self, metadata: Metadata) -> PatchHistory:
        """Return the history after the patch; `metadata` is that of the patched object."""
        return histories.landed(self.history, metadata, self.desired)


def plan(picture: KubeVirtPicture, manner: Manner, history: PatchHistory, at: datetime) -> KubeVirtPlan:
    """Return the plan for a KubeVirt; `history` is that of the previous plan."""
    subject = subject_of(picture)
    if isinstance(subject, Reason):
        by_kubevirt = withheld(picture, None)
        return KubeVirtPlan(history, reasons=(subject, *_reasons(by_kubevirt)), withheld=_withheld(by_kubevirt))
    ours, by_kubevirt = changes_of(subject.metadata.annotations), withheld(picture, subject)
    desired, reasons = _desired_configuration(picture, manner, subject, ours, by_kubevirt)
    patch = conditional(subject.metadata.resource_version, drafted(subject, ours, desired))
    managed, stale = manner.manage and picture.opted_out is None, history.is_of_later(subject.metadata)
    if managed and not stale:
        history = histories.step(history, subject.metadata, desired.items, desired.lacking(subject), at)
    dry_run = not managed or history.stopped
    if patch and not managed:
        reasons = (
            *reasons,
            Reason(
                ReasonCode.KUBEVIRT_NOT_MANAGED,
                subject.where,
                "lacks fields that VMs need to use the offered devices, and the controller is not permitted to write"
                " it",
                (
                    Seen(
                        "", f"the annotation {picture.opted_out}" if picture.opted_out else "the controller's settings"
                    ),
                ),
                "write what the dry run shows, or permit the controller to write",
            ),
        )
    if patch and history.stopped:
        reasons = (
            *reasons,
            Reason(
                ReasonCode.CONFIG_REVERTED,
                subject.where,
                f"was written {MOST_REVERTS} times and reverted each time; it is not written again, and no more vGPUs"
                " are created",
                (Seen("generations of the object", "the newer lack fields of the older"),),
                "have the program that writes it (often a GitOps tool) write what the dry run shows, or omit these"
                " fields",
            ),
        )
    risk = _risk(picture, subject, desired, written=not dry_run)
    return KubeVirtPlan(
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
    subject: PermittingObject,
    ours: OurChanges,
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
    reasons = (*listing.reasons, *(clusterproblems.gate_disabled(subject.where, gate) for gate in denied))
    reasons = (*reasons, second) if second is not None else reasons
    return desired, (*reasons, *(handling.reasons if picture.mdevs else ()))


def _gated(picture: KubeVirtPicture, offered: Offered) -> Mapping[str, Reason]:
    """Return the resources of Grace GPUs while KubeVirt lacks gates for them, with the reason."""
    missing = missing_gates(picture.version, picture.gates)
    return {
        name: Reason(
            ReasonCode.GRACE_GATES_MISSING,
            name,
            "gets no entry in permittedHostDevices: it is a Grace GPU, and with its id there KubeVirt refuses VMs that"
            f" request it while the feature gates {', '.join(missing)} are off",
            (
                Seen(
                    f"{picture.where} $.spec.configuration.developerConfiguration.featureGates",
                    f"no {', '.join(missing)}",
                ),
            ),
            "enable the gates, and give such VMs dedicated CPUs; IOMMUFD first needs /dev/iommu on all nodes with VMs,"
            " since each virt-launcher pod then requests devices.kubevirt.io/iommufd, and libvirt 12.2 in"
            " virt-launcher",
        )
        for name, selectors in offered.items()
        if missing and any(is_grace(selector) for selector in selectors.pci)
    }


def _risk(
    picture: KubeVirtPicture, subject: PermittingObject, desired: DesiredConfiguration, *, written: bool
) -> Reason | None:
    """Return the reason with the mediated devices that KubeVirt would delete, now and after the patch if it is sent."""
    handling = desired.handling
    if handling is None or handling.off or (handling.will_be_off and written):
        return None
    entries = (*picture.effective, *(subject.entries or ()))
    listed = (entry for entry in entries if entry.external and not entry.disabled)
    spared = {normal(entry.selector) for entry in listed if entry.part is DeviceList.MDEV}
    spared |= {normal(entry.selector) for entry in desired.listing.add if written and entry.part is DeviceList.MDEV}
    types = {name for selectors in picture.offered.values() for name in selectors.mdev if normal(name) not in spared}
    if not types:
        return None
    return Reason(
        ReasonCode.MDEV_DELETION_RISK,
        subject.where,
        f"lets KubeVirt delete mediated devices of the types {', '.join(sorted(types))}, so none are created",
        (
            Seen("mediatedDevicesConfiguration.enabled", "is not false"),
            Seen("gate DisableMDEVConfiguration", "is not set"),
            Seen("permittedHostDevices.mediatedDevices", "no entry with externalResourceProvider: true for them"),
        ),
        "set one of these three fields",
    )

"""The inputs of decisions about one KubeVirt, and the object that decides what it permits."""

from collections.abc import Mapping

import msgspec

from gpuvirt.controller.kubevirt.changes import MANAGE_ANNOTATION
from gpuvirt.controller.kubevirt.offered import ByKubeVirt, Names, Offered, offered_by_kubevirt
from gpuvirt.controller.kubevirt.subject import (
    PermittedEntry,
    PermittingObject,
    entries_of,
    is_owned_by_hco,
    of_hyper_converged,
    of_kubevirt,
)
from gpuvirt.kube.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.kubevirt.kubevirt import Configuration, DeveloperConfiguration
from gpuvirt.model.kubevirt.version import Version, version_of
from gpuvirt.model.reasons import Reason, clusterproblems


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
    def is_opted_out(self) -> bool:
        """Whether the annotation `gpuvirt.io/manage: "false"` of the KubeVirt or its HyperConverged forbids changes."""
        hcos = (self.hyper_convergeds.value if self.hyper_convergeds is not None else None) or ()
        owners = hcos if is_owned_by_hco(self.kubevirt) else ()
        found = (self.kubevirt.metadata, *(owner.metadata for owner in owners))
        return any(metadata.annotations.get(MANAGE_ANNOTATION, "").lower() == "false" for metadata in found)


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

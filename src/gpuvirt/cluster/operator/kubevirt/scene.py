"""All that a decision about KubeVirt rests on."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuvirt.cluster.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.cluster.operator.kubevirt.changes import MANAGE_ANNOTATION
from gpuvirt.cluster.operator.kubevirt.names import Names
from gpuvirt.cluster.operator.kubevirt.offered import ByKubeVirt, Offered, offered_by_kubevirt
from gpuvirt.cluster.operator.kubevirt.subject import (
    Entry,
    Subject,
    entries_of,
    is_owned_by_hco,
    of_hyper_converged,
    of_kubevirt,
)
from gpuvirt.cluster.operator.kubevirt.versions import Version, version_of
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.doctor.kubevirt import Configuration
from gpuvirt.model.reasons import Reason, kubevirtproblems


@dataclass(frozen=True, slots=True)
class KubeVirtPicture:
    """It, as it was heard."""

    kubevirt: KubeVirt
    offered: Offered
    """What nodes offer; what is wanted of them and not there yet may be in it."""
    names: Names
    """What machines ask for."""
    hyper_convergeds: Observed[tuple[HyperConverged, ...]] | None = None
    """None: unheard; None of the value: HCO is not installed."""
    mdevs: bool = False
    """Whether some node has mediated devices, or may come to have some."""

    @property
    def version(self) -> Version | None:
        """KubeVirt's version."""
        status = self.kubevirt.status
        return version_of(status.observed_kube_virt_version) if status is not None else None

    @property
    def effective(self) -> tuple[Entry, ...]:
        """What KubeVirt permits now, whoever has it do so."""
        return entries_of((self.kubevirt.spec.configuration or Configuration()).permitted_host_devices)

    @property
    def is_opted_out(self) -> bool:
        """Whether KubeVirt, or the HyperConverged that owns it, says that it is to be left alone."""
        hcos = (self.hyper_convergeds.value if self.hyper_convergeds is not None else None) or ()
        owners = hcos if is_owned_by_hco(self.kubevirt) else ()
        found = (self.kubevirt.metadata, *(one.metadata for one in owners))
        return any(one.annotations.get(MANAGE_ANNOTATION, "").lower() == "false" for one in found)


def subject_of(picture: KubeVirtPicture) -> Subject | Reason:
    """Return the object that decides, or why it is not known."""
    where = _where(picture)
    if not is_owned_by_hco(picture.kubevirt):
        return of_kubevirt(picture.kubevirt)
    if picture.hyper_convergeds is None:
        return kubevirtproblems.hyper_converged_unknown(where)
    hcos = picture.hyper_convergeds.value or ()
    if len(hcos) != 1:
        return kubevirtproblems.hyper_converged_ambiguous(where, len(hcos))
    return of_hyper_converged(hcos[0])


def withheld(picture: KubeVirtPicture, subject: Subject | None) -> Mapping[str, ByKubeVirt]:
    """Return what agents are not to offer, since KubeVirt does."""
    written = subject.entries or () if subject is not None and subject.is_hco else ()
    effective, where = picture.effective, _where(picture)

    def place(entry: Entry) -> str:
        lists = "$.spec.configuration.permittedHostDevices"
        hco = subject is not None and entry not in effective
        return f"{subject.where if hco and subject is not None else where} {lists}.{entry.part}[{entry.index}]"

    return offered_by_kubevirt((*effective, *written), picture.offered, place)


def _where(picture: KubeVirtPicture) -> str:
    return f"KubeVirt {picture.kubevirt.metadata.namespace}/{picture.kubevirt.metadata.name}"

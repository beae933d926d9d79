"""KubeVirts and HyperConvergeds as documents, and the controller's changes to them."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from gpuvirt.controller.kubevirt.changes import PatchHistory
from gpuvirt.controller.kubevirt.offered import Names, Offered
from gpuvirt.controller.kubevirt.planning import KubeVirtPicture, KubeVirtPlan, Manner, plan
from gpuvirt.controller.kubevirt.undoer import Undoing, undo
from gpuvirt.kube.jsonpatch import Operation
from gpuvirt.kube.kinds.core import OwnedMetadata
from gpuvirt.kube.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.devices.candidates import ResourceKind, Selectors
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.plain import Plain
from tests.webhook.jsonpatches import patched

BEGINNING = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
A10, T4_8Q, T4_4Q = "nvidia.com/GA102GL_A10", "nvidia.com/GRID_T4-8Q", "nvidia.com/GRID_T4-4Q"
OFFERED: Offered = {
    A10: Selectors(ResourceKind.WHOLE, ("10DE:2236",)),
    T4_8Q: Selectors(ResourceKind.VGPU, (), ("GRID T4-8Q",)),
}
Fields = dict[str, Plain]


def kubevirt(configuration: Fields | None = None, version: str = "v1.8.0", **metadata: Plain) -> Fields:
    """Return a KubeVirt."""
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {
            "name": "kubevirt",
            "namespace": "kubevirt",
            "uid": "1",
            "resourceVersion": "10",
            "generation": 1,
            **metadata,
        },
        "spec": {} if configuration is None else {"configuration": configuration},
        "status": {"observedKubeVirtVersion": version},
    }


def hyper_converged(spec: Fields | None = None) -> Fields:
    """Return a HyperConverged."""
    found = kubevirt(name="kubevirt-hyperconverged", namespace="kubevirt-hyperconverged", uid="2")
    return found | {"apiVersion": "hco.kubevirt.io/v1beta1", "kind": "HyperConverged", "spec": spec or {}}


def at(document: Plain, *keys: str | int) -> Plain:
    """Return the value at these keys; None where it does not exist."""
    for key in keys:
        if isinstance(document, dict) and isinstance(key, str):
            document = document.get(key)
        elif isinstance(document, list) and isinstance(key, int) and key < len(document):
            document = document[key]
        else:
            return None
    return document


def entry(selector: str, resource: str, external: bool | None = True, key: str = "pciVendorSelector") -> Fields:
    """Return an entry of a list of permitted devices."""
    found: Fields = {key: selector, "resourceName": resource}
    return found if external is None else found | {"externalResourceProvider": external}


class Cluster(msgspec.Struct):
    """The cluster that the controller reads and changes."""

    document: Fields
    offered: Offered = msgspec.field(default_factory=lambda: OFFERED)
    names: Names = msgspec.field(default_factory=Names)
    hco: Fields | None = None
    mdevs: bool = True
    mdev_nodes: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    manner: Manner = msgspec.field(default_factory=Manner)
    history: PatchHistory = msgspec.field(default_factory=PatchHistory)
    now: datetime = BEGINNING

    @property
    def picture(self) -> KubeVirtPicture:
        return KubeVirtPicture(
            msgspec.convert(self.document, KubeVirt),
            self.offered,
            self.names,
            Observed((msgspec.convert(self.hco, HyperConverged),) if self.hco is not None else None),
            self.mdevs,
            self.mdev_nodes,
        )

    @property
    def plan(self) -> KubeVirtPlan:
        return plan(self.picture, self.manner, self.history, self.now)

    @property
    def undoing(self) -> Undoing:
        return undo(self.picture)

    @property
    def subject(self) -> Fields:
        return self.document if self.hco is None else self.hco

    def step(self) -> KubeVirtPlan:
        """Let the controller decide and write once."""
        done = self.plan
        self.history = done.history
        if done.writes:
            before = self.subject.get("spec")
            self.write(done.writes)
            if self.subject.get("spec") != before:
                self.history = done.landed(self.metadata)
        return done

    def write(self, operations: Iterable[Operation]) -> None:
        """Apply a patch as the API server does, which increments versions and generations."""
        before = self.subject
        after = patched(before, operations)
        assert isinstance(after, dict)
        metadata = after["metadata"]
        assert isinstance(metadata, dict)
        metadata["resourceVersion"] = str(int(str(metadata["resourceVersion"])) + 1)
        if after.get("spec") != before.get("spec"):
            metadata["generation"] = int(str(metadata["generation"])) + 1
        if metadata.get("annotations") == {}:
            del metadata["annotations"]
        if self.hco is None:
            self.document = after
        else:
            self.hco = after

    @property
    def metadata(self) -> OwnedMetadata:
        if self.hco is not None:
            return msgspec.convert(self.hco, HyperConverged).metadata
        return msgspec.convert(self.document, KubeVirt).metadata

    def restore(self, spec: Plain) -> None:
        """Let another program write its own spec."""
        self.subject["spec"] = spec
        metadata = self.subject["metadata"]
        assert isinstance(metadata, dict)
        metadata["resourceVersion"] = str(int(str(metadata["resourceVersion"])) + 1)
        metadata["generation"] = int(str(metadata["generation"])) + 1
        self.now += timedelta(minutes=3)


def codes(found: KubeVirtPlan | Undoing) -> list[ReasonCode]:
    """Return the codes of the reasons."""
    return [reason.code for reason in found.reasons]

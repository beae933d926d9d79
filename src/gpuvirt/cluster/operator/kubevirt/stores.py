"""Everything of KubeVirt that the controller follows: its configuration, and what asks for devices."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from gpuvirt.clock import Signal
from gpuvirt.cluster.client import Client, Collection, PatchType
from gpuvirt.cluster.kinds import kubevirt as kinds
from gpuvirt.cluster.operator.kubevirt.decisions import Histories, KubeVirtHeard, PatchKubeVirt
from gpuvirt.cluster.operator.kubevirt.names import Machines
from gpuvirt.cluster.operator.store import Store
from gpuvirt.cluster.resources import KubernetesObject, Metadata
from gpuvirt.model.heard import Heard

T = TypeVar("T", bound=KubernetesObject)


class Follow(Protocol):
    """Has a store follow its collection."""

    def __call__(self, store: Store[T], /) -> None:
        """Begin."""
        ...


class KubeVirtStores:
    """One store a kind."""

    def __init__(self, changed: Signal) -> None:
        self._kubevirts = Store(Collection(kinds.KUBEVIRTS, kinds.KubeVirt), changed)
        self._hyper_convergeds = Store(Collection(kinds.HYPER_CONVERGEDS, kinds.HyperConverged), changed)
        self._machines = Store(kinds.MACHINES, changed)
        self._instances = Store(kinds.INSTANCES, changed)
        self._replica_sets = Store(kinds.REPLICA_SETS, changed)
        self._pools = Store(kinds.POOLS, changed)
        self._instancetypes = Store(kinds.INSTANCETYPES, changed)
        self._cluster_instancetypes = Store(kinds.CLUSTER_INSTANCETYPES, changed)
        self._instancetype_revisions = Store(kinds.INSTANCETYPE_REVISIONS, changed)

    def _troubles(self) -> Iterator[str]:
        """Yield why kinds that were never heard are not."""
        found = (
            (store.objects, store.trouble)
            for store in (
                self._kubevirts,
                self._hyper_convergeds,
                self._machines,
                self._instances,
                self._replica_sets,
                self._pools,
                self._instancetypes,
                self._cluster_instancetypes,
                self._instancetype_revisions,
            )
        )
        return (str(trouble) for objects, trouble in found if objects is None and trouble is not None)

    def heard(self, histories: Histories, kept: str | None) -> KubeVirtHeard:
        """Return what was heard; `histories` and `kept` are what is known of our patches."""
        return KubeVirtHeard(
            kubevirts=self._kubevirts.objects,
            hyper_convergeds=_heard(self._hyper_convergeds),
            machines=Machines(
                machines=_heard(self._machines),
                instances=_heard(self._instances),
                replica_sets=_heard(self._replica_sets),
                pools=_heard(self._pools),
                instancetypes=_heard(self._instancetypes),
                cluster_instancetypes=_heard(self._cluster_instancetypes),
                instancetype_revisions=_heard(self._instancetype_revisions),
            ),
            histories=histories,
            troubles=tuple(self._troubles()),
            kept=kept,
        )

    def follow(self, follow: Follow) -> None:
        """Have all of them follow their collections."""
        follow(self._kubevirts)
        follow(self._hyper_convergeds)
        follow(self._machines)
        follow(self._instances)
        follow(self._replica_sets)
        follow(self._pools)
        follow(self._instancetypes)
        follow(self._cluster_instancetypes)
        follow(self._instancetype_revisions)

    async def patch(self, client: Client, write: PatchKubeVirt) -> Metadata:
        """Send a patch, know what came of it, and return the object's metadata; raises ApiError."""
        target, operations = write.target, write.plan.writes
        if target.resource == kinds.HYPER_CONVERGEDS:
            hco = await client.patch(target.resource, target.name, operations, PatchType.JSON, kinds.HyperConverged)
            self._hyper_convergeds.take(hco)
            return hco.metadata
        found = await client.patch(target.resource, target.name, operations, PatchType.JSON, kinds.KubeVirt)
        self._kubevirts.take(found)
        return found.metadata


def _heard(store: Store[T]) -> Heard[tuple[T, ...]] | None:
    """Return what was heard of a kind: None where nothing was, and that there is no such kind where it is not."""
    if not store.installed:
        return Heard(None)
    return Heard(tuple(store.objects.values())) if store.objects is not None else None

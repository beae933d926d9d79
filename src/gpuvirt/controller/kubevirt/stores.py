"""The stores of KubeVirt's objects: its configuration, and the objects that name devices."""

from typing import TypeVar

from gpuvirt.clock import Signal
from gpuvirt.controller.kubevirt.decisions import Histories, KubeVirtObserved, PatchKubeVirt
from gpuvirt.controller.store import AnyStore, Store
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, KUBEVIRTS, HyperConverged, KubeVirt
from gpuvirt.kube.resources import Collection, FullObject, KubernetesObject, Metadata
from gpuvirt.model.desired.observed import Observed

T = TypeVar("T", bound=KubernetesObject)
F = TypeVar("F", bound=FullObject)


class KubeVirtStores:
    """One store for each kind."""

    def __init__(self, changed: Signal) -> None:
        self._kubevirts = Store(Collection(KUBEVIRTS, KubeVirt), changed)
        self._hyper_convergeds = Store(Collection(HYPER_CONVERGEDS, HyperConverged), changed)
        self._requesting = {kind.name: Store(kind.collection, changed) for kind in DEVICE_KINDS}
        self.all: tuple[AnyStore, ...] = (self._kubevirts, self._hyper_convergeds, *self._requesting.values())

    def observed(self, histories: Histories, kept: str | None) -> KubeVirtObserved:
        """Return the observed state; `histories` and `kept` are the history of the controller's patches."""
        unlisted = (store.problem for store in self.all if not store.is_observed and store.problem is not None)
        requesting = {name: _observed(store) for name, store in self._requesting.items()}
        return KubeVirtObserved(
            kubevirts=self._kubevirts.objects,
            hyper_convergeds=_observed(self._hyper_convergeds),
            requesting={name: observed for name, observed in requesting.items() if observed is not None},
            histories=histories,
            problems=tuple(map(str, unlisted)),
            kept=kept,
        )

    async def patch(self, client: Client, write: PatchKubeVirt) -> Metadata:
        """Send a patch, store the patched object, and return its metadata; raises ApiError."""
        if write.target.resource == HYPER_CONVERGEDS:
            return await _patch(client, self._hyper_convergeds, write)
        return await _patch(client, self._kubevirts, write)


async def _patch(client: Client, store: Store[F], write: PatchKubeVirt) -> Metadata:
    target, operations = write.target, write.plan.writes
    found = await client.patch(target.resource, target.name, operations, PatchType.JSON, store.collection.shape)
    store.take(found)
    return found.metadata


def _observed(store: Store[T]) -> Observed[tuple[T, ...]] | None:
    """Return the objects of a kind: None if they are not observed, `Observed(None)` if the kind is not installed."""
    if not store.installed:
        return Observed(None)
    return Observed(tuple(store.objects.values())) if store.objects is not None else None

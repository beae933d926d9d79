"""Removes gpuvirt's changes from KubeVirt once, at uninstall. What VMs still need stays, and is reported.

It decides by the current objects, VMs and nodes included, and retries after a conflict with another writer. The danger:
a KubeVirt that handles mediated devices again deletes those that it did not create, even if VMs use them. So all
changes that keep it from doing so stay while a VM requests a mediated device.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.controller.kubevirt.changes import (
    ANNOTATION,
    DeviceList,
    OurChanges,
    OurEntry,
    changes_of,
    text_of,
)
from gpuvirt.controller.kubevirt.listing import is_ours
from gpuvirt.controller.kubevirt.mediated import GPU, HOST_DEVICES, handling_of, holds
from gpuvirt.controller.kubevirt.offered import names_of, needs_mdevs, offered_of, selects
from gpuvirt.controller.kubevirt.planning import KubeVirtPicture, subject_of
from gpuvirt.controller.kubevirt.subject import MEDIATED, PermittedEntry, PermittingObject
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiRefusedError, ConflictError, NotFoundError, retried
from gpuvirt.kube.jsonpatch import Draft, Operation, annotate, at, conditional
from gpuvirt.kube.kinds.core import AnyObject, WholePod
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, KUBEVIRTS, HyperConverged, KubeVirt
from gpuvirt.kube.resources import Collection, KubernetesObject, Resource
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.kubevirt.kubevirt import MDEV_GATE
from gpuvirt.model.reasons import Reason, ReasonCode

T = TypeVar("T", bound=KubernetesObject)
PODS = Collection(Resource("pods"), WholePod)
"""Pods of all namespaces: pods other than those of VMs may use vGPUs, and GpuNodes may be missing."""
CONFLICTS = (ConflictError, ApiRefusedError)
"""The API server refuses a patch whose test fails as invalid (422)."""


class Undoing(msgspec.Struct, frozen=True):
    """The patch that removes gpuvirt's changes."""

    resource: Resource | None = None
    """The collection of the object to patch; None if that object is unknown."""
    name: str = ""
    patch: tuple[Operation, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """The changes that stay, and the reasons for them."""


class _UndoInputs(msgspec.Struct, frozen=True):
    picture: KubeVirtPicture
    subject: PermittingObject
    ours: OurChanges

    def is_named(self, resource: str) -> bool:
        """Return whether a VM requests a resource, or may do so because the requests are not observed."""
        return bool(self.picture.names.unknown) or resource in self.picture.names.used

    def is_needed(self, entry: PermittedEntry) -> bool:
        """Return whether a VM requests the resource of an entry, or mediated devices that the entry spares."""
        spares = (
            name
            for name, selectors in self.picture.offered.items()
            if entry.part is DeviceList.MDEV and selects(entry, selectors)
        )
        if entry.part is DeviceList.MDEV and not self.picture.offered:  # an earlier run has deleted the GpuNodes
            return self.mdevs_named
        return self.is_named(entry.resource) or any(self.is_named(name) for name in spares)

    @property
    def mdevs(self) -> frozenset[str]:
        """The resources of mediated devices that gpuvirt knows of."""
        listed = {entry.resource for entry in self.subject.entries or () if entry.part is DeviceList.MDEV}
        offered = {name for name, selectors in self.picture.offered.items() if selectors.mdev}
        entries = {entry.resource for entry in self.ours.entries if entry.part is DeviceList.MDEV}
        return frozenset(listed | offered | entries | {*self.ours.spared})

    @property
    def mdevs_named(self) -> bool:
        """Whether a VM requests mediated devices that gpuvirt knows of."""
        switches = self.ours.switch is not None or MDEV_GATE in self.ours.gates
        return any(self.is_named(resource) for resource in self.mdevs) or (
            switches and bool(self.picture.names.unknown)
        )

    @property
    def all_ours(self) -> bool:
        """Whether gpuvirt created the lists and added all their entries."""
        entries = self.subject.entries or ()
        return self.subject.permitted in self.ours.made and all(is_ours(self.ours, entry) for entry in entries)


def undo(picture: KubeVirtPicture) -> Undoing:
    """Return the patch for a KubeVirt, or for the HyperConverged that owns it."""
    subject = subject_of(picture)
    if isinstance(subject, Reason):
        return Undoing(reasons=(subject,))
    inputs = _UndoInputs(picture, subject, changes_of(subject.metadata.annotations))
    draft = Draft(subject.containers)
    entries = _remove_entries(inputs, draft)
    gates = _remove_gates(inputs, draft)
    switch_stays = _reset_switch(inputs, draft)
    left = OurChanges(
        entries=entries,
        gates=gates,
        switch=inputs.ours.switch if switch_stays else None,
        made=tuple(pointer for pointer in inputs.ours.made if pointer in subject.containers and draft.has(pointer)),
    )
    if left.switch or MDEV_GATE in left.gates or any(entry.part is DeviceList.MDEV for entry in left.entries):
        left = replace(left, spared=tuple(sorted(inputs.mdevs)))
    elif not (left.entries or left.gates):
        left = OurChanges()
    annotate(draft, subject.metadata.annotations, ANNOTATION, text_of(left))
    patch = conditional(subject.metadata.resource_version, draft.operations)
    return Undoing(subject.resource, subject.metadata.name, patch, tuple(_stays(subject, left)))


def _remove_entries(inputs: _UndoInputs, draft: Draft) -> tuple[OurEntry, ...]:
    """Remove gpuvirt's entries that no VM needs; return those that stay."""
    subject, ours = inputs.subject, inputs.ours
    if subject.entries is None:
        return ()
    own = [entry for entry in subject.entries if is_ours(ours, entry)]
    # Without lists KubeVirt permits every device, so that VMs need no entry. But an entry may spare mediated devices.
    spared = handling_of(subject, inputs.picture.version).off or not any(entry.part is DeviceList.MDEV for entry in own)
    if inputs.all_ours and (spared or not inputs.mdevs_named):
        draft.remove(subject.permitted)
        return ()
    removed = [entry for entry in own if not inputs.is_needed(entry)]
    for part in (DeviceList.PCI, DeviceList.MDEV):
        pointer = f"{subject.permitted}/{part}"
        entries = [entry for entry in subject.entries if entry.part is part]
        indices = [entry.index for entry in removed if entry.part is part]
        if indices and len(indices) == len(entries) and pointer in ours.made:
            draft.remove(pointer)
        else:
            draft.remove_entries(pointer, indices)
    return tuple(entry.as_ours() for entry in own if entry not in removed)


def _remove_gates(inputs: _UndoInputs, draft: Draft) -> tuple[str, ...]:
    """Remove gpuvirt's gates that no VM needs, each once even if another writer added it, too; return the others."""
    subject, names = inputs.subject, inputs.picture.names
    needed = {
        GPU: bool(names.gpus or names.unknown),
        HOST_DEVICES: bool(names.host_devices or names.unknown),
        MDEV_GATE: inputs.mdevs_named,
    }
    own = [gate for gate in inputs.ours.gates if gate in subject.gates]
    removed = [gate for gate in own if not needed.get(gate, True)]
    if removed and len(removed) == len(subject.gates) and subject.gates_pointer in inputs.ours.made:
        draft.remove(subject.gates_pointer)
    else:
        draft.remove_entries(subject.gates_pointer, (subject.gates.index(gate) for gate in removed))
    return tuple(gate for gate in own if gate not in removed)


def _reset_switch(inputs: _UndoInputs, draft: Draft) -> bool:
    """Restore the field by which KubeVirt handles mediated devices; return whether gpuvirt's value stays instead."""
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


def _stays(subject: PermittingObject, left: OurChanges) -> Iterator[Reason]:
    what = [f"the entry {entry.resource}" for entry in left.entries]
    what += [f"the gate {gate}" for gate in left.gates]
    what += [left.switch.pointer] if left.switch is not None else []
    if what:
        yield Reason(
            ReasonCode.RESOURCE_STILL_REFERENCED,
            subject.where,
            f"keeps {', '.join(what)}, which VMs or pods request, or may request",
            fix="delete those VMs and pods and run the undo again, or keep the entries",
        )


def held_names(gpu_nodes: Iterable[GpuNode]) -> frozenset[str]:
    """Return the resources that are allocated on a node, also to pods that are no VMs.

    If any vGPU is in use, all resources of mediated devices count: KubeVirt would delete the vGPU under any name.
    """
    statuses = [gpu_node.status for gpu_node in gpu_nodes if gpu_node.status is not None]
    in_use = any(vgpu.users for status in statuses for gpu in status.gpus for vgpu in gpu.vgpus)
    return frozenset(
        resource.name
        for status in statuses
        for resource in status.resources
        if resource.allocated != 0 or (in_use and resource.mdev_name_selectors)
    )


class KubeVirtUndoer:
    """Removes gpuvirt's changes from all KubeVirts of a cluster."""

    def __init__(self, client: Client, clock: Clock, gpu_nodes: Sequence[GpuNode]) -> None:
        """Make an undoer; `gpu_nodes` report the resources that nodes offer."""
        self._client = client
        self._clock = clock
        self._gpu_nodes = gpu_nodes

    async def run(self) -> AsyncIterator[str]:
        """Remove the changes, and yield a line for each object that was patched or keeps changes; raises ApiError."""
        for kubevirt in (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ():
            for line in await retried(partial(self._undo, kubevirt.metadata.uid), self._clock, CONFLICTS):
                yield line

    async def _undo(self, uid: str) -> Sequence[str]:
        """Remove the changes from one KubeVirt, and return the lines about it; raises ApiError."""
        picture = await self._picture(uid)
        if picture is None:
            return ()
        found, where = undo(picture), f"{picture.kubevirt.metadata.namespace}/{picture.kubevirt.metadata.name}"
        if (annotation := picture.opted_out) is not None:
            return (f"KubeVirt {where} stays as it is, by its annotation {annotation}",)
        left = tuple(reason.text for reason in found.reasons)
        if found.resource is None or not found.patch:
            return left
        await self._client.patch(found.resource, found.name, found.patch, PatchType.JSON, AnyObject)
        return (f"{found.resource.plural} {found.name}: removed what gpuvirt had added for KubeVirt {where}", *left)

    async def _picture(self, uid: str) -> KubeVirtPicture | None:
        """Read a KubeVirt and the state around it; None if it has been deleted. Raises ApiError."""
        kubevirts = (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ()
        found = next((kubevirt for kubevirt in kubevirts if kubevirt.metadata.uid == uid), None)
        if found is None:
            return None
        requesting = {kind.name: await self._observed(kind.collection) for kind in DEVICE_KINDS}
        names, pods = names_of(requesting), (await self._observed(PODS)).value or ()
        held = held_names(self._gpu_nodes).union(*(pod.requests for pod in pods))
        return KubeVirtPicture(
            kubevirt=found,
            offered=offered_of(self._gpu_nodes),
            names=replace(names, by_others=held),
            hyper_convergeds=await self._observed(Collection(HYPER_CONVERGEDS, HyperConverged)),
            mdevs=needs_mdevs(self._gpu_nodes),
        )

    async def _observed(self, collection: Collection[T]) -> Observed[tuple[T, ...]]:
        """List a collection; `Observed(None)` if the kind is not installed. Raises ApiError."""
        try:
            return Observed((await self._client.list(collection)).items)
        except NotFoundError:
            return Observed(None)

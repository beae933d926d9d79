"""Keeps the labels and annotations of the agent's own node that parts of the agent claim.

They are written by a merge patch of the claimed keys alone. It names no resource version, so other writers of the node
cause no conflict. If patching is not permitted (NVIDIA's roles permit updates alone), the node is read and written back
whole with its version, and again after a conflict. A write is retried until it succeeds, always with the latest values.

`shared_claim` claims the annotation with the node's shared GPUs, and the labels with its vGPU type.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec

from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.clock import Signal
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.failures import ForbiddenError, retried
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import DesiredLabels, Fields, LabelPatch, patch_of, patched
from gpuvirt.kube.resources import NODES, Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION, shared_gpus_text
from gpuvirt.model.shares.sharedgpus import NodeVgpuType, SharedGpus
from gpuvirt.shares.nodekeys import OWNED_ANNOTATION, owned_labels

log = logging.getLogger(__name__)


class LabelClaim(msgspec.Struct, frozen=True):
    """The labels and annotations that one part of the agent keeps on the node."""

    keys: Callable[[Metadata], DesiredLabels]
    """Returns the desired keys for the observed metadata of the node; they may include keys that are right already."""
    notifying: Callable[[Signal], AbstractContextManager[None]]
    """Sets a signal whenever the desired keys may have changed."""


class NodeLabels:
    """Keeps the claimed labels and annotations of one node."""

    def __init__(self, dependencies: KeeperDependencies) -> None:
        self._dependencies = dependencies
        self._known: ObservedObject[Node] = ObservedObject()
        self._due = Signal()

    def observe(self, delta: Delta[Node]) -> None:
        """Store the observed node. While it does not exist, nothing is written."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._due.set()

    async def run(self, claims: Sequence[LabelClaim], report: ReportOutcome) -> None:
        """Write the claimed keys whenever they differ; `report` gets each error, and None after a success."""
        with ExitStack() as stack:
            for claim in claims:
                stack.enter_context(claim.notifying(self._due))
            await self._dependencies.keep(lambda: self._lacking(claims), self._write, report, self._due)

    def _lacking(self, claims: Sequence[LabelClaim]) -> LabelPatch | None:
        node = self._known.item
        return patch_of([claim.keys(node.metadata) for claim in claims], node.metadata) if node is not None else None

    async def _write(self, patch: LabelPatch) -> None:
        before = self._known.latest
        self._known.answer(before, await self._written(patch))

    async def _written(self, patch: LabelPatch) -> Node:
        try:
            return await self._dependencies.client.patch(NODES, self._dependencies.node, patch, PatchType.MERGE, Node)
        except ForbiddenError as forbidden:
            log.debug("patching nodes is not permitted; updating the whole node instead")
            try:
                return await retried(lambda: self._update(patch), self._dependencies.clock)
            except ForbiddenError:
                raise forbidden from None  # its message names the permission to add, and patching is the smaller one

    async def _update(self, patch: LabelPatch) -> Node:
        client, node = self._dependencies.client, self._dependencies.node
        return await client.update(NODES, node, patched(await client.get(NODES, node, Fields), patch), Node)


def shared_claim(views: Cell[NodeView]) -> LabelClaim:
    """Return the claim of the annotation and the labels; before the host is observed, the node's stay as they are."""

    def keys(observed: Metadata) -> DesiredLabels:
        view = views.get()
        if not view.host_observed:
            return DesiredLabels()
        labels = _type_keys(observed, view.vgpu_type) if view.vgpu_type is not None else DesiredLabels()
        return DesiredLabels(labels.labels, labels.annotations | _annotation(view.shared))

    return LabelClaim(keys, views.notifying)


def _annotation(shared: SharedGpus) -> dict[str, str | None]:
    if not shared.gpus and not shared.recorded:
        return {SHARED_GPUS_ANNOTATION: None, LIMITS_ANNOTATION: None}
    limits: dict[str, str | None] = {}
    if shared.enforcement is not None:
        limits[LIMITS_ANNOTATION] = str(shared.enforcement) if shared.enforcement.is_limit else None
    units = {SHARED_GPUS_ANNOTATION: shared_gpus_text(shared.schedulable)} if shared.is_known else {}
    return {**units, **limits}


def _type_keys(observed: Metadata, vgpu_type: NodeVgpuType) -> DesiredLabels:
    owned, label = owned_labels(observed), vgpu_type.label
    desired = {
        key: label for key in vgpu_type.keys if label is not None and (key in owned or key not in observed.labels)
    }
    gone = dict.fromkeys(key for key in owned if key not in desired)
    written = msgspec.json.encode(dict(sorted(desired.items()))).decode() if desired else None
    return DesiredLabels({**gone, **desired}, {OWNED_ANNOTATION: written})

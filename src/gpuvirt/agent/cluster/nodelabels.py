"""The labels and annotations of the agent's node: the desired state in them, and those that the agent's parts claim.

They are written by a merge patch of the claimed keys alone. It names no resource version, so other writers of the node
cause no conflict. If patching is not permitted (NVIDIA's roles permit updates alone), the node is read and written back
whole with its version, and again after a conflict. A write is retried until it succeeds, always with the latest values.

`shared_claim` claims the annotation with the node's shared GPUs, and the labels with its vGPU type.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec

from gpuvirt import plain
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.clock import Signal
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.failures import ForbiddenError, retried
from gpuvirt.kube.kinds.core import ConfigMap, Node
from gpuvirt.kube.labels import (
    CONFIG_LABEL,
    ENFORCEMENT_LABEL,
    REASON_ANNOTATION,
    STATE_LABEL,
    WORKLOAD_LABEL,
    WORKLOAD_REASON_ANNOTATION,
    WORKLOAD_STATE_LABEL,
    DesiredLabels,
    Fields,
    LabelPatch,
    patch_of,
    patched,
)
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import NODES, Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, Progress
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


CONFIG_KEY = "config.yaml"
"""The entry of the ConfigMap that has the vGPU configs."""

MOST_REASON = 1000
"""The most characters of a reason; all annotations of an object together may have 256 KiB."""

TakeRequest = Callable[[NodeRequest], None]
"""Stores the desired state of a node; parts that the request lacks stay as they are."""


def request_of_node(node: Node | None) -> NodeRequest:
    """Return the desired state in a node's labels.

    While the node object does not exist, the desired state stays as it is: the node was deleted to be registered again,
    or is not registered yet, and its VMs run. A label without a value counts as absent, as in NVIDIA's device manager.
    """
    if node is None:
        return NodeRequest()
    labels = node.metadata.labels
    config, workload, enforcement = (
        labels.get(label) or None for label in (CONFIG_LABEL, WORKLOAD_LABEL, ENFORCEMENT_LABEL)
    )
    return NodeRequest(config=Observed(config), workload=Observed(workload), enforcement=Observed(enforcement))


def request_of_config_map(key: ObjectKey, config_map: ConfigMap | None) -> NodeRequest:
    """Return the vGPU configs in a ConfigMap; None stands for a ConfigMap that does not exist."""
    if config_map is None:
        return NodeRequest(configs=Observed(None))
    text, where = config_map.data.get(CONFIG_KEY), f"ConfigMap {key.namespace}/{key.name}, key {CONFIG_KEY}"
    if text is None:
        return NodeRequest(configs=Observed(ConfigText("", where, tuple(sorted(config_map.data)))))
    return NodeRequest(configs=Observed(ConfigText(text, where)))


def observe_node(observe: TakeRequest, key: ObjectKey) -> Callable[[Delta[Node]], None]:
    """Return a function that passes changes of a node's labels to `observe`."""
    return lambda delta: observe(request_of_node(delta.objects.get(key)))


def observe_config_map(observe: TakeRequest, key: ObjectKey) -> Callable[[Delta[ConfigMap]], None]:
    """Return a function that passes changes of a ConfigMap to `observe`."""
    return lambda delta: observe(request_of_config_map(key, delta.objects.get(key)))


class StateLabel(msgspec.Struct, frozen=True):
    """The label of a state, and the annotation with its reason."""

    label: str
    annotation: str


OF_VGPUS = StateLabel(STATE_LABEL, REASON_ANNOTATION)
OF_WORKLOAD = StateLabel(WORKLOAD_STATE_LABEL, WORKLOAD_REASON_ANNOTATION)


def state_labels(state: Progress | None, state_label: StateLabel = OF_VGPUS) -> DesiredLabels:
    """Return the label and the annotation of a state; while it is unknown, the node's stay as they are."""
    return (
        DesiredLabels(
            {state_label.label: state.name}, {state_label.annotation: plain.one_line(state.reason, MOST_REASON) or None}
        )
        if state is not None
        else DesiredLabels()
    )


def state_claim(states: Cell[Progress | None], state_label: StateLabel) -> LabelClaim:
    """Return the claim of the label and the annotation of a state."""
    return LabelClaim(lambda _: state_labels(states.get(), state_label), states.notifying)

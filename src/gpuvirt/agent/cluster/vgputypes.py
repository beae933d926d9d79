"""The node's annotation with the types of its on-demand resources, and events about those whose type has changed."""

import logging
from collections.abc import Mapping

import msgspec

from gpuvirt.agent.cluster.gpunode import REPORTER
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.agent.cluster.nodelabels import LabelClaim
from gpuvirt.agent.cluster.podshares import RequestingPod
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube import events
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.events import About, EventDraft, EventLevel, Reporter
from gpuvirt.kube.failures import ConflictError, NotFoundError
from gpuvirt.kube.kinds.gpunode import API_VERSION, KIND, GpuNode
from gpuvirt.kube.labels import DesiredLabels
from gpuvirt.kube.resources import Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.ondemand.typesannotation import (
    VGPU_TYPES_ANNOTATION,
    TypeChange,
    Types,
    changes_of,
    reason_of,
    types_of,
    types_on_node,
    types_text,
)
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason

log = logging.getLogger(__name__)


class _Due(msgspec.Struct, frozen=True):
    change: TypeChange
    reason: Reason
    gpu_node: str
    """The UID of the GpuNode that the event is about."""


class VgpuTypes:
    """Keeps the annotation of one node. Each change of a resource's type is written as an event about the GpuNode."""

    def __init__(self, dependencies: KeeperDependencies, views: Cell[NodeView]) -> None:
        self._dependencies = dependencies
        self._views = views
        self._noted: str | None = None
        """The annotation as observed."""
        self._changes: dict[ResourceName, TypeChange] = {}
        """The changes whose events are not written yet."""
        self._compared: tuple[Types, Types] | None = None
        self._pods: Mapping[str, RequestingPod] | None = None
        """The pods of the node by namespace and name; None until the API server has listed them."""
        self._gpu_node: str | None = None
        self._due = Signal()

    @property
    def claim(self) -> LabelClaim:
        """The claim of the annotation; before the host is observed, the node's stays as it is."""
        return LabelClaim(self._keys, self._views.notifying)

    @property
    def in_use(self) -> bool:
        """Whether the node offers on-demand vGPUs, or has offered some as its annotation says."""
        return bool(self._noted) or any(resource.on_demand is not None for resource in self._views.get().resources)

    def _keys(self, observed: Metadata) -> DesiredLabels:
        view = self._views.get()
        if not view.host_observed:
            return DesiredLabels()
        noted = types_of(observed.annotations.get(VGPU_TYPES_ANNOTATION))
        types = types_on_node(view, noted)
        self._compare(noted, types)
        return DesiredLabels({}, {VGPU_TYPES_ANNOTATION: types_text(types) if types else None})

    def _compare(self, noted: Types, types: Types) -> None:
        """Record the change that a write of the annotation would make; a repeated write makes the same one."""
        if (noted, types) == self._compared:
            return
        self._compared = noted, types
        for change in changes_of(noted, types):
            log.warning(
                "%s stood for %s, and stands for %s now", change.resource, change.before, change.now or "nothing"
            )
            self._changes[change.resource] = change
            self._due.set()

    def observe_node(self, metadata: Metadata) -> None:
        """Record the metadata of the node."""
        self._noted = metadata.annotations.get(VGPU_TYPES_ANNOTATION)

    def observe_pods(self, delta: Delta[RequestingPod]) -> None:
        """Record all pods of the node."""
        self._pods = {pod.where: pod for pod in delta.objects.values()}
        self._due.set()

    def observe_gpu_node(self, gpu_node: GpuNode | None) -> None:
        """Record the GpuNode, None if it does not exist."""
        self._gpu_node = gpu_node.metadata.uid if gpu_node is not None else None
        self._due.set()

    async def run(self, report: ReportOutcome) -> None:
        """Write events, until cancelled; `report` gets each error, and None after a success."""
        await self._dependencies.keep(self._lacking, self._write, report, self._due)

    def _lacking(self) -> _Due | None:
        if self._pods is None or self._gpu_node is None:
            return None
        for change in tuple(self._changes.values()):
            name, pods = change.resource, self._pods.items()
            reason = reason_of(change, [where for where, pod in pods if not pod.is_ending and pod.names(name)])
            if reason is not None:
                return _Due(change, reason, self._gpu_node)
            del self._changes[name]
        return None

    async def _write(self, due: _Due) -> None:
        node, at = self._dependencies.node, self._dependencies.clock.now()
        draft = EventDraft(EventLevel.WARNING, due.reason.code, due.reason.text)
        event = events.event_of(draft, About(API_VERSION, KIND, node, due.gpu_node), Reporter(REPORTER, node), at)
        try:
            await events.create(self._dependencies.client, event)
        except (NotFoundError, ConflictError) as error:
            log.info("no event about %s: %s", due.change.resource, error)
        if self._changes.get(due.change.resource) == due.change:
            del self._changes[due.change.resource]

"""Creates the node's GpuNode if it does not exist, writes the agent's view to its status, and writes events."""

from collections.abc import Iterator

import msgspec

from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.clock import Signal
from gpuvirt.kube import events
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.events import EventDraft, EventLevel
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.kinds.gpunode import API_VERSION, GPU_NODES, KIND, READY, GpuNode, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.node.podmemory import PodMemory

REPORTER = "gpuvirt.io/node"
PAUSE_S = 1.0
"""The pause between two writes, since the view may change many times while a pod starts."""


def events_between(before: Status | None, after: Status) -> Iterator[EventDraft]:
    """Yield events about the changes between two statuses; for the first status, only about invalid desired state."""
    known = {invalid.message for invalid in before.invalid} if before is not None else set[str]()
    for invalid in after.invalid:
        if invalid.message not in known:
            yield EventDraft(EventLevel.WARNING, invalid.code, invalid.message)
    if before is None:
        return
    modes = {gpu.address: gpu.mode for gpu in before.gpus}
    for gpu in after.gpus:
        if (mode := modes.get(gpu.address, gpu.mode)) != gpu.mode:
            yield EventDraft(EventLevel.NORMAL, "ModeChanged", f"{gpu.address} changed from mode {mode} to {gpu.mode}")
    for address in sorted(modes.keys() - {gpu.address for gpu in after.gpus}):
        yield EventDraft(EventLevel.WARNING, "GpuGone", f"{address} has disappeared from the host")
    ready, was = _ready(after), _ready(before)
    if ready is None or ready.reason == ReasonCode.AWAITS_CONTROLLER:
        return  # every new resource waits for the controller for a moment
    if after.invalid and ready.message.startswith(after.invalid[0].message):
        return  # invalid desired state has its own events
    if was is None or (ready.status, ready.reason) != (was.status, was.reason):
        kind = EventLevel.NORMAL if ready.status == "True" else EventLevel.WARNING
        yield EventDraft(kind, ready.reason, ready.message or "all GPUs are in their desired state")


def _ready(status: Status) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == READY), None)


class _Name(msgspec.Struct, frozen=True):
    name: str


class _New(msgspec.Struct, frozen=True, rename="camel"):
    """A new GpuNode, without a spec, so that it changes no desired state.

    It has no owner: deleting a Node, as is done to register it again, would delete the admin's desired state with it.
    """

    api_version: str
    kind: str
    metadata: _Name


class _StatusPatch(msgspec.Struct, frozen=True):
    status: Status


class _Due(msgspec.Struct, frozen=True):
    """The next write."""

    content: _New | _StatusPatch


class GpuNodeKeeper:
    """Keeps the GpuNode of one node."""

    def __init__(self, dependencies: KeeperDependencies) -> None:
        self._dependencies = dependencies
        self._known: ObservedObject[GpuNode] = ObservedObject()
        self._due = Signal()
        self._pruned: tuple[Status, Status | None] | None = None
        """The status that was written last, and its stored form: an older CRD drops unknown fields."""

    def observe(self, delta: Delta[GpuNode]) -> None:
        """Store the observed GpuNode, or that it does not exist."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._due.set()

    async def run(
        self, views: Cell[NodeView], report: ReportOutcome, memory: Cell[tuple[PodMemory, ...]] | None = None
    ) -> None:
        """Write the status whenever it differs from the view; `report` gets each error, and None after a success.

        `memory` has the memory use of pods with limits; None for an agent that shares no GPUs.
        """
        used: Cell[tuple[PodMemory, ...]] = Cell(()) if memory is None else memory

        def lacking() -> _Due | None:
            if self._known.latest is None:
                return None
            node = self._known.latest.item
            if node is None:
                return _Due(_New(API_VERSION, KIND, _Name(self._dependencies.node)))
            if not views.get().host_observed and node.status is not None:
                return None  # the status from before the restart stays until the host has been observed
            status = status_of(views.get(), node, self._dependencies.clock.now(), used.get())
            is_due = status != node.status and (status, node.status) != self._pruned
            return _Due(_StatusPatch(status)) if is_due else None

        with views.notifying(self._due), used.notifying(self._due):
            await self._dependencies.keep(lacking, self._write, report, self._due)

    async def _write(self, due: _Due) -> None:
        client, content, before = self._dependencies.client, due.content, self._known.latest
        if isinstance(content, _New):
            try:
                node = await client.create(GPU_NODES, content, GpuNode)
            except ConflictError:  # another client has just created it
                self._known.doubt(before)
                return
        else:
            node = await client.patch(
                GPU_NODES, self._dependencies.node, content, PatchType.MERGE, GpuNode, part="status"
            )
            self._pruned = content.status, node.status
        self._known.answer(before, node)
        await self._write_events(before.item if before is not None else None, node)
        await self._dependencies.clock.sleep(PAUSE_S)

    async def _write_events(self, before: GpuNode | None, after: GpuNode) -> None:
        if after.status is None:
            return
        about = events.About(API_VERSION, KIND, self._dependencies.node, after.metadata.uid)
        by, at = events.Reporter(REPORTER, self._dependencies.node), self._dependencies.clock.now()
        delta = events_between(before.status if before is not None else None, after.status)
        await events.write(self._dependencies.client, events.events_of([(about, draft) for draft in delta], by, at))

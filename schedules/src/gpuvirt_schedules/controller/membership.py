"""The schedules that must look at their workers between switches: a node was labelled, deleted, or registered again.

The nodes are those that the controller watches anyway. A heartbeat of a node changes neither its labels nor its uid.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule, WorkerStatus
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_schedules.controller.workertypes import PhaseTypes, types_of


class _Seen(msgspec.Struct, frozen=True):
    uid: str
    labels: Mapping[str, str]


class ObservedNodes:
    """The nodes as they were observed last, and those that a schedule has not followed yet."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Seen] = {}
        self._pending: set[str] = set()

    @property
    def is_pending(self) -> bool:
        """Whether a schedule has other workers than its status says, or might have."""
        return bool(self._pending)

    def observe(self, delta: Delta[ReadNode]) -> bool:
        """Record changes of nodes; return whether labels or a uid changed. A delta that names no change may be any."""
        names = {key.name for key in delta.changed | delta.removed} or {
            *self._nodes,
            *(key.name for key in delta.objects),
        }
        found = {key.name: delta.objects[key].metadata for key in delta.objects if key.name in names}
        is_changed = False
        for name in names:
            metadata = found.get(name)
            now = _Seen(metadata.uid, metadata.labels) if metadata is not None else None
            if now != self._nodes.get(name):
                is_changed = True  # also of a node that is pending already: it was deleted, and is back
                self._pending.add(name)
            if now is not None:
                self._nodes[name] = now
            else:
                self._nodes.pop(name, None)
        return is_changed

    def moved(self, schedules: Iterable[VgpuSchedule]) -> frozenset[str]:
        """Return the schedules, by name, whose statuses do not follow their nodes yet; those nodes stay pending."""
        moved, waiting = set[str](), set[str]()
        for schedule in schedules:
            if schedule.spec.suspend:
                continue
            workers = {worker.node: worker for worker in schedule.status.workers}
            behind = {name for name in self._pending if self._is_behind(schedule, name, workers.get(name))}
            if behind:
                moved.add(schedule.metadata.name)
                waiting |= behind
        self._pending = waiting
        return frozenset(moved)

    def _is_behind(self, schedule: VgpuSchedule, name: str, worker: WorkerStatus | None) -> bool:
        node = self._nodes.get(name)
        if node is None:
            return worker is not None and bool(worker.node_uid)
        types: PhaseTypes = types_of(schedule.spec.phases, node.labels)
        if worker is None:
            return bool(types)
        if not types:
            was_replaced = worker.node_uid != node.uid
            return not was_replaced or worker.code != ReasonCode.WORKER_LABELS_LOST
        given = {str(phase): vgpu_type for phase, vgpu_type in types.items() if vgpu_type is not None}
        return (worker.node_uid, {*worker.phases}, worker.types) != (node.uid, {*types}, given)

"""Chooses the GPUs of a pod when its first container starts, and records them before any change can have them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.shares.gpuclaims import GpuClaims
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.agent.shares.recordstore import RecordsNotWrittenError
from gpuvirt.agent.shares.refusals import ShareRefusedError
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.model.reasons import Reason, sharing
from gpuvirt.model.shares.demand import ContainerName, Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode, choose, why_refused
from gpuvirt.model.shares.node.limits import with_limits
from gpuvirt.model.shares.node.records import PodRecord, ShareRecords, record_of

log = logging.getLogger(__name__)


class GpuChoice:
    """The choice of GPUs on one node."""

    def __init__(self, shares: NodeShares, claims: GpuClaims) -> None:
        self._shares = shares
        self._claims = claims

    def why_refused(self, units: Units) -> Reason | None:
        """Return why no GPU can give units to any container now, None if one can."""
        shares, node = self._shares, self._shares.state.get().node
        open_node, closed = self._open(node)
        reason = why_refused(units, open_node, shares.records, shares.resource, shares.kept_texts)
        if reason is not None and why_refused(units, node, shares.records, "") is None:
            return closed
        return reason

    async def choose(self, pod: PodOnNode, unit: DeviceId) -> PodRecord:
        """Choose the GPUs of a pod that has not started, and record them on disk; raise ShareRefusedError.

        A GPU that a change has is no choice. `unit` is one of the ids that the container has.
        """
        shares = self._shares
        node, closed = self._open(shares.state.get().node)
        while True:
            found = choose(pod, node, shares.records, (shares.pods.known or {}).values())
            if found is None:
                raise ShareRefusedError(closed or self._no_room(pod, node))
            new = record_of(pod.namespace, pod.name, pod.demand, found.containers)
            record = with_limits(new, node, requires=pod.requires_limits)
            if isinstance(record, Reason):
                raise ShareRefusedError(record)
            try:
                with self._pending(pod.uid, record, unit):
                    await self._save(shares.store.records.get().with_pod(pod.uid, record))
            except RefusedError as error:
                closed = error.reason
                node = replace(
                    node, capacity={gpu: units for gpu, units in node.capacity.items() if gpu not in found.used}
                )
                continue
            moved = pod.desired is not None and pod.desired.containers != found.containers
            log.info("pod %s/%s gets %s", pod.namespace, pod.name, dict(found.used), extra={"moved": moved})
            return record

    def claim_again(self, pod: PodRecord, container: ContainerName, unit: DeviceId) -> None:
        """Claim the GPUs of a container that starts again, or after another of its pod; raise ShareRefusedError."""
        share = pod.containers.get(container)
        try:
            self._claims.claim(share.gpus if share is not None else (), unit, lambda: None)
        except RefusedError as error:
            raise ShareRefusedError(error.reason) from error

    @contextmanager
    def _pending(self, uid: PodUid, record: PodRecord, unit: DeviceId) -> Iterator[None]:
        """Claim the GPUs of a pod, and let changes see its share until it is on disk; raise RefusedError."""
        pending = self._shares.pending
        self._claims.claim(record.placement.used, unit, lambda: pending.set({**pending.get(), uid: record}))
        try:
            yield
        finally:
            pending.set({other: share for other, share in pending.get().items() if other != uid})

    async def _save(self, records: ShareRecords) -> None:
        try:
            await self._shares.store.save(records)
        except RecordsNotWrittenError as error:
            raise ShareRefusedError(error.reason) from error

    def _open(self, node: NodeSharing) -> tuple[NodeSharing, Reason | None]:
        """Return a node without the GPUs that can't be claimed now, with the reason against the first of them."""
        reasons = {gpu: self._claims.why_closed(gpu) for gpu in sorted(node.capacity)}
        capacity = {gpu: units for gpu, units in node.capacity.items() if reasons[gpu] is None}
        return replace(node, capacity=capacity), next((reason for reason in reasons.values() if reason), None)

    def _no_room(self, pod: PodOnNode, node: NodeSharing) -> Reason:
        free = self._shares.records.usage(node.capacity).free
        left = {str(gpu): int(units) for gpu, units in free.items()}
        placed = pod.desired is not None
        return sharing.no_room(
            f"pod {pod.namespace}/{pod.name}", pod.demand.total, left, self._shares.kept_texts, placed=placed
        )

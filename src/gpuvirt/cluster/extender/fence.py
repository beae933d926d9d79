"""The fence: a change of a pod after which no binding that was sent before can bind it.

A Binding has the version of the pod that it was decided on, which is a precondition in the transaction that binds the
pod (Kubernetes, pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata; GuaranteedUpdate in
apiserver/pkg/storage/etcd3/store.go). So a binding that arrives late is refused once its pod has another version. The
fence is an annotation that it gets through `pods/status`, with the same precondition: a pod that has changed by itself
needs none, and one that was bound meanwhile gets none.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.failures import ApiError, ConflictError, NotFoundError, NotUnderstoodError
from gpuvirt.cluster.resources import pods
from gpuvirt.cluster.shares.index import Index
from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.model.shares.annotations import FENCE_ANNOTATION

log = logging.getLogger(__name__)

CHANGE_S = 1.5
"""The longest wait for the change of one pod."""
RETRY_S = 0.25
OBSERVE_EVERY_S = 0.02
AT_ONCE = 16
"""Pods that are changed at the same time."""


class _FenceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    resource_version: str
    annotations: dict[str, str]


class _FencePatch(msgspec.Struct, frozen=True):
    metadata: _FenceMetadata


class Fence:
    """Changes the versions of pods."""

    def __init__(self, client: Client, index: Index, clock: Clock) -> None:
        self._client = client
        self._index = index
        self._clock = clock
        self._left = 0
        self._problem = ""

    @property
    def missing(self) -> str:
        """What `change_all` still waits for."""
        why = f": {self._problem}" if self._problem else ""
        return f"bindings of earlier leaders may still arrive for {self._left} pods, which are being changed{why}"

    async def change(self, pod: SharingPod) -> SharingPod | None:
        """Return a pod in another version than `pod` has, bound or not; None where it is gone or was replaced.

        Raises ApiError and TimeoutError.
        """
        metadata = pod.metadata
        patch = _FencePatch(
            _FenceMetadata(pod.uid, metadata.resource_version, {FENCE_ANNOTATION: secrets.token_hex(8)})
        )
        resource, name = pods(metadata.namespace), metadata.name
        found: SharingPod | None
        async with asyncio.timeout(CHANGE_S):
            try:
                found = await self._client.patch(resource, name, patch, PatchType.MERGE, SharingPod, part="status")
            except NotFoundError:
                return None
            except ConflictError:
                found = await self.read(pod)
        if found is not None and found.metadata.resource_version == metadata.resource_version:
            raise NotUnderstoodError(
                f"pod {pod.where} still has the version {metadata.resource_version} after a change"
            )
        return found

    async def read(self, pod: SharingPod) -> SharingPod | None:
        """Return a pod as the API server has it; None where it is gone or was replaced. Raises ApiError."""
        try:
            found = await self._client.get(pods(pod.metadata.namespace), pod.metadata.name, SharingPod)
        except NotFoundError:
            return None
        return found if found.uid == pod.uid else None

    async def change_all(self, unbound: Iterable[SharingPod]) -> None:
        """Change pods, and return when the index has those that were bound before their change."""
        waiting = list(unbound)
        self._left, self._problem = len(waiting), ""
        if waiting:
            log.info("changing pods so that no binding of an earlier leader is made", extra={"pods": len(waiting)})

        async def work() -> None:
            while waiting:
                await self._change_surely(waiting.pop())
                self._left -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(waiting))):
                group.create_task(work())

    async def _change_surely(self, pod: SharingPod) -> None:
        while True:
            try:
                found = await self.change(pod)
            except (ApiError, TimeoutError) as error:
                self._problem = str(error) or "the API server did not answer in time"
                await self._clock.sleep(RETRY_S)
                continue
            while found is not None and found.spec.node_name and not self._is_observed(found):
                await self._clock.sleep(OBSERVE_EVERY_S)
            return

    def _is_observed(self, pod: SharingPod) -> bool:
        """Return whether the index has a pod as bound, or has it no more."""
        known = self._index.pod(pod.metadata.namespace, pod.metadata.name)
        return known is None or known.uid != pod.uid or bool(known.spec.node_name)

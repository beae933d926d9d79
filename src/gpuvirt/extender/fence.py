"""The fence: a change of a pod after which no binding that was sent before can bind it.

A Binding has the version of the pod that it was decided on, which is a precondition in the transaction that binds the
pod (Kubernetes, pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata; GuaranteedUpdate in
apiserver/pkg/storage/etcd3/store.go). So a binding that arrives late is refused once its pod has another version. The
fence is an annotation that it gets through `pods/status`, with the same precondition: a pod that has changed by itself
needs none, and one that was bound meanwhile gets none.

A few pods that nobody can change, because a webhook or a policy refuses it, keep no other pod waiting: the index counts
each of them on each GPU of each node, since a binding of it may still be made there, until it is changed or gone. Each
earlier leader left room for its own binding, so that the units of each GPU suffice for all of them.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError, NotUnderstoodError
from gpuvirt.kube.resources import pods
from gpuvirt.model.reasons import count_of
from gpuvirt.model.shares.annotations import FENCE_ANNOTATION
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingPod

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Pods that are changed at the same time."""
MOST_WITHHELD = 8
"""How many pods may be unchanged while others are placed: each takes its units of each GPU in the cluster."""
TRIES = 4
"""How often the change of a pod fails before others are placed without it."""
NAMED = 3
"""How many pods a message names."""


class _FenceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    resource_version: str | msgspec.UnsetType
    annotations: dict[str, str]


class _FencePatch(msgspec.Struct, frozen=True):
    metadata: _FenceMetadata


class Fence:
    """Changes the versions of pods."""

    def __init__(self, client: Client, index: Index, clock: Clock, intervals: ExtenderIntervals = INTERVALS) -> None:
        self._intervals = intervals
        self._client = client
        self._index = index
        self._clock = clock
        self._open: dict[PodUid, SharingPod] = {}
        """The pods that `change_all` has not changed yet."""
        self._tries: Counter[PodUid] = Counter()
        """How often the changes of these pods have failed."""
        self._problem = ""
        self._name = secrets.token_hex(4)
        """The begin of all values that this process writes."""

    @property
    def missing(self) -> str:
        """A message about the pods that `change_all` has not changed yet, with its latest problem."""
        why = f": {self._problem}" if self._problem else ""
        names = ", ".join(pod.where for pod in list(self._open.values())[:NAMED])
        named = f"{names}, ..." if len(self._open) > NAMED else names
        return f"bindings of earlier leaders may still arrive for {count_of(len(self._open), 'pod')} ({named}){why}"

    def why_withheld(self, pod: PodUid) -> str | None:
        """Return why a pod cannot be placed while others can; None for one that was changed, or needs no change."""
        return self.missing if pod in self._open else None

    async def change(self, pod: SharingPod) -> SharingPod | None:
        """Return a pod in another version than `pod` has, bound or not; None where it is gone or was replaced.

        Raises ApiError and TimeoutError.
        """
        version = pod.metadata.resource_version
        found: SharingPod | None
        async with asyncio.timeout(self._intervals.change_s):
            try:
                found = await self._write(pod, version)
            except NotFoundError:
                return None
            except ConflictError:
                found = await self.read(pod)
        if found is not None and found.metadata.resource_version == version:
            raise NotUnderstoodError(f"pod {pod.where} still has the version {version} after a change")
        return found

    def is_foreign(self, found: SharingPod, known: SharingPod) -> bool:
        """Return whether another process has fenced a pod since its version `known`.

        It leads, whatever the clock of this process says: that of a paused VM may have stood still.
        """
        value = found.metadata.annotations.get(FENCE_ANNOTATION, "")
        return value != known.metadata.annotations.get(FENCE_ANNOTATION, "") and not value.startswith(self._name)

    async def wake(self, pod: SharingPod) -> None:
        """Have kube-scheduler try a pod again, in whatever version it is; one that can't be changed waits."""
        try:
            async with asyncio.timeout(self._intervals.change_s):
                await self._write(pod, msgspec.UNSET)
        except (NotFoundError, ConflictError):
            return  # it is gone, or replaced
        except (ApiError, TimeoutError) as error:
            log.warning("pod %s fits now and can't be changed, so it waits up to 5 minutes: %s", pod.where, error)
        else:
            log.info("woke a pod whose units became free after it was refused", extra={"pod": pod.where})

    async def _write(self, pod: SharingPod, version: str | msgspec.UnsetType) -> SharingPod:
        """Write another value into the annotation of a pod, and return the pod; unset: in whatever version it is."""
        patch = _FencePatch(_FenceMetadata(pod.uid, version, {FENCE_ANNOTATION: self._name + secrets.token_hex(4)}))
        resource, name = pods(pod.metadata.namespace), pod.metadata.name
        return await self._client.patch(resource, name, patch, PatchType.MERGE, SharingPod, part="status")

    async def read(self, pod: SharingPod) -> SharingPod | None:
        """Return a pod as the API server has it; None where it is gone or was replaced. Raises ApiError."""
        try:
            found = await self._client.get(pods(pod.metadata.namespace), pod.metadata.name, SharingPod)
        except NotFoundError:
            return None
        return found if found.uid == pod.uid else None

    async def change_all(self, unbound: Iterable[SharingPod], few_left: Callable[[], None]) -> None:
        """Change pods, and return when the index has those that were bound before their change.

        `few_left` is called once no more pods are left than the index can count on each GPU.
        """
        waiting = deque(unbound)
        self._open, self._tries, self._problem = {pod.uid: pod for pod in waiting}, Counter(), ""
        if waiting:
            log.info("changing pods so that no binding of an earlier leader is made", extra={"pods": len(waiting)})

        async def work() -> None:
            while waiting:
                pod = waiting.popleft()
                if await self._is_changed(pod):
                    del self._open[pod.uid]
                    self._index.restore(pod.uid)
                else:
                    await self._clock.sleep(self._intervals.again_s)
                    waiting.append(pod)
                if 0 < len(self._open) <= MOST_WITHHELD and all(self._tries[uid] >= TRIES for uid in self._open):
                    self._withhold()
                    few_left()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(waiting))):
                    group.create_task(work())
        finally:
            for uid in self._open:
                self._index.restore(uid)
            self._open = {}

    def _withhold(self) -> None:
        new = [pod for pod in self._open.values() if not self._index.is_withheld(pod.uid)]
        if new:
            log.warning("%s; these pods count on each GPU until they are changed or deleted", self.missing)
        for pod in new:
            self._index.withhold(pod)

    async def _is_changed(self, pod: SharingPod) -> bool:
        try:
            found = await self.change(pod)
        except (ApiError, TimeoutError) as error:
            self._tries[pod.uid] += 1
            self._problem = str(error) or "the API server did not answer in time"
            return self._has_changed(pod)
        while found is not None and found.spec.node_name and not self._is_observed(found):
            await self._clock.sleep(self._intervals.look_s)
        return True

    def _has_changed(self, pod: SharingPod) -> bool:
        """Return whether an event has reported a pod as bound, gone, or in another version than it had."""
        known = self._index.pod(pod.metadata.namespace, pod.metadata.name)
        return self._is_observed(pod) or (
            known is not None and known.metadata.resource_version != pod.metadata.resource_version
        )

    def _is_observed(self, pod: SharingPod) -> bool:
        """Return whether the index has a pod as bound, or has it no more."""
        known = self._index.pod(pod.metadata.namespace, pod.metadata.name)
        return known is None or known.uid != pod.uid or bool(known.spec.node_name)

"""Bindings, and their writes: each is made, not made, or of unknown outcome, and its units stay reserved so long.

A Binding has the version of its pod as a precondition, which is read before the lease is checked, right before the
write. A process that leads later changes the version of each unbound pod before it places any (`fence`). So a write
that arrives late is refused, however late that is; a try of unknown outcome is made certain in the same way.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.extender.fence import AT_ONCE, Fence
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import NOT_MADE, ApiError, ConflictError, NotSentError
from gpuvirt.kube.resources import pods
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, pod_shares_text
from gpuvirt.model.shares.placement import Placement
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingPod


class CannotBindError(GpuvirtError):
    """A pod cannot be bound as kube-scheduler asks; the text has the reason."""


class _BindingMetadata(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    namespace: str
    uid: str
    resource_version: str = ""
    annotations: dict[str, str] = {}


class _Target(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    kind: str = "Node"
    api_version: str = "v1"


class Binding(msgspec.Struct, frozen=True, rename="camel"):
    """The Binding of a pod to a node, with the annotations that the pod gets."""

    metadata: _BindingMetadata
    target: _Target
    api_version: str = "v1"
    kind: str = "Binding"


class Write(msgspec.Struct, frozen=True):
    """A binding that is to be written."""

    pod: SharingPod
    """The pod in the version that the API server must still have."""
    node: NodeName
    chosen: Placement

    @property
    def key(self) -> tuple[PodUid, NodeName]:
        """The pod and the node."""
        return self.pod.uid, self.node

    @property
    def content(self) -> Binding:
        """The object to create."""
        metadata = self.pod.metadata
        annotations = {SHARES_ANNOTATION: pod_shares_text(self.chosen)} if self.chosen.containers else {}
        return Binding(
            _BindingMetadata(metadata.name, metadata.namespace, metadata.uid, metadata.resource_version, annotations),
            _Target(self.node),
        )

    @property
    def failed(self) -> str:
        """The begin of the text for a write that was not made."""
        return f"pod {self.pod.where} was not bound to node {self.node}"


log = logging.getLogger(__name__)

MOST_TRIES = 4
"""How often a binding is sent whose pod changes meanwhile."""


class _Unresolved(msgspec.Struct, frozen=True):
    """A binding that was sent, and the versions of its pod by which it may still be made."""

    write: Write
    versions: set[str] = msgspec.field(default_factory=set)


class Writes:
    """The bindings that are being written, and those of unknown outcome."""

    def __init__(
        self,
        client: Client,
        index: Index,
        fence: Fence,
        clock: Clock,
        may_write: Callable[[], bool],
        intervals: ExtenderIntervals = INTERVALS,
    ) -> None:
        self._intervals = intervals
        self._client = client
        self._index = index
        self._fence = fence
        self._clock = clock
        self._may_write = may_write
        """Whether this process has the lease at this moment."""
        self._term = 0
        self._under_way: set[tuple[PodUid, NodeName]] = set()
        self._unresolved: dict[tuple[PodUid, NodeName], _Unresolved] = {}
        """The bindings that were sent, from before they are sent until it is known whether they were made."""
        self._resolving: set[tuple[PodUid, NodeName]] = set()

    @property
    def under_way(self) -> int:
        """The number of bindings whose answer has not come yet."""
        return len(self._under_way)

    @property
    def held(self) -> frozenset[tuple[PodUid, NodeName]]:
        """The bindings whose request has ended without an answer that says whether they were made."""
        return frozenset(self._unresolved.keys() - self._under_way)

    def is_under_way(self, pod: PodUid, node: NodeName) -> bool:
        """Return whether a binding is being written, or its outcome is being found out."""
        return (pod, node) in self._under_way or (pod, node) in self._resolving

    def is_unknown(self, pod: PodUid, node: NodeName) -> bool:
        """Return whether it is not known if a binding was made."""
        return (pod, node) in self._unresolved

    async def settled(self) -> None:
        """Wait until no binding is under way; no longer than one can take."""
        deadline_s = self._clock.monotonic_s() + self._intervals.binding_s
        while self._under_way and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(self._intervals.look_s)

    async def begin_term(self) -> None:
        """Have no binding of an earlier term sent again, and return once the outcome of each is known."""
        self._term += 1
        while self._unresolved or self._under_way:
            await self._resolve_held()
            if self._unresolved or self._under_way:
                await self._clock.sleep(self._intervals.again_s)

    async def make(self, write: Write) -> None:
        """Write a binding whose units are reserved; raise CannotBindError."""
        self._under_way.add(write.key)
        term, sent = self._term, write
        try:
            async with asyncio.timeout(self._intervals.binding_s):
                for _ in range(MOST_TRIES):
                    changed = await self._try(sent, term)
                    if changed is None:
                        break
                    sent = replace(sent, pod=changed)
                else:
                    self._free(write)
                    raise CannotBindError(f"{write.failed}: the pod changes all the time")
        except TimeoutError as error:
            raise CannotBindError(f"{write.failed}: the API server did not answer in time") from error
        finally:
            self._under_way.discard(write.key)
        log.info(
            "bound a pod",
            extra={"pod": write.pod.where, "node": write.node, "gpus": ",".join(sorted(write.chosen.used)) or None},
        )

    async def read(self, namespace: str, name: str) -> SharingPod:
        """Return a pod as the API server has it; raises ApiError, TimeoutError."""
        async with asyncio.timeout(self._intervals.read_s):
            return await self._client.get(pods(namespace), name, SharingPod)

    async def _try(self, write: Write, term: int) -> SharingPod | None:
        """Send a binding once, and return None once it is made; raise CannotBindError.

        Returns the pod where it has changed since the version of `write`: the binding is then to be sent again.
        """
        unresolved = self._unresolved.setdefault(write.key, _Unresolved(write))
        version = write.pod.metadata.resource_version
        is_new = version not in unresolved.versions
        unresolved.versions.add(version)
        error = await self._send(write, term)
        if error is None:
            self._unresolved.pop(write.key, None)
            return None
        if is_new and isinstance(error, (*NOT_MADE, ConflictError)):
            unresolved.versions.discard(version)
        if not isinstance(error, NOT_MADE):
            return await self._settle(write, error)
        if not unresolved.versions:  # otherwise an earlier try may still be made
            self._free(write)
        raise CannotBindError(f"{write.failed}: {error}") from error

    async def _send(self, write: Write, term: int) -> Exception | None:
        """Send a binding, and return the error; None where it was made."""
        resource, name = pods(write.pod.metadata.namespace), write.pod.metadata.name

        def may_send() -> bool:
            return self._may_write() and self._term == term

        try:
            async with asyncio.timeout(self._intervals.write_s):
                await self._client.create_part(
                    resource, name, "binding", write.content, within_s=self._intervals.write_s, may_send=may_send
                )
        except (ApiError, TimeoutError) as error:
            return error
        return None

    async def _settle(self, write: Write, error: Exception) -> SharingPod | None:
        """Find out whether a binding was made that was answered by an error or not at all. Returns as `_try`."""
        why = str(error) or "the API server did not answer in time"
        try:
            found = await self._resolved(self._unresolved[write.key])
        except (ApiError, TimeoutError) as unread:
            raise CannotBindError(f"{write.failed}: {why}; whether it is bound is not known: {unread}") from error
        if found is not None and found.spec.node_name == write.node:
            self._unresolved.pop(write.key, None)
            log.info(
                "pod %s is bound to node %s, although the API server answered: %s", write.pod.where, write.node, why
            )
            return None
        is_open = found is not None and not found.spec.node_name and not found.metadata.deletion_timestamp
        if found is not None and is_open and isinstance(error, ConflictError) and self._may_go_on(found, write.pod):
            self._unresolved[write.key].versions.clear()
            return found
        self._free(write)
        gone = "; the pod is gone" if found is None else ""
        raise CannotBindError(f"{write.failed}: {why}{gone}") from error

    def _may_go_on(self, found: SharingPod, pod: SharingPod) -> bool:
        """Return whether a binding may be sent again, for the version `found`: no other leader has made that one."""
        has_changed = found.metadata.resource_version != pod.metadata.resource_version
        return has_changed and not self._fence.is_foreign(found, pod)

    async def _resolved(self, unresolved: _Unresolved) -> SharingPod | None:
        """Return the pod of a binding when it cannot be made any more, None where the pod is gone or was replaced.

        Raises ApiError and TimeoutError. What decides is the version of the pod, never the error of a try.
        """
        async with asyncio.timeout(self._intervals.read_s):
            found = await self._fence.read(unresolved.write.pod)
            if found is None or found.spec.node_name or found.metadata.resource_version not in unresolved.versions:
                return found
            if not self._may_write():
                raise NotSentError(f"pod {found.where} is not changed, since this process does not lead")
            return await self._fence.change(found)

    def _free(self, write: Write) -> None:
        self._unresolved.pop(write.key, None)
        self._index.release(*write.key)

    async def run(self) -> None:
        """Find out, until cancelled, which writes of unknown outcome were made; the units of the others are freed."""
        while True:
            await self._clock.sleep(self._intervals.unknown_s)
            if self._may_write():
                await self._resolve_held()

    async def _resolve_held(self) -> None:
        """Try to find out the outcomes of the bindings that are held."""
        held = [self._unresolved[key] for key in sorted(self.held - self._resolving)]
        for begin in range(0, len(held), AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for unresolved in held[begin : begin + AT_ONCE]:
                    group.create_task(self._resolve(unresolved))

    async def _resolve(self, unresolved: _Unresolved) -> None:
        """Free the units of a binding if it was not made; where its pod cannot be read, they stay reserved."""
        write = unresolved.write
        if write.key in self._under_way:
            return
        self._resolving.add(write.key)
        try:
            found = await self._resolved(unresolved)
        except (ApiError, TimeoutError) as error:
            log.info("whether pod %s is bound to node %s is still not known: %s", write.pod.where, write.node, error)
            return
        finally:
            self._resolving.discard(write.key)
        if found is not None and found.spec.node_name == write.node:
            self._unresolved.pop(write.key, None)
        else:
            self._free(write)

"""The writes of bindings: each is made, not made, or of unknown outcome, and its units stay reserved accordingly.

The lease is checked when the connection is there, right before the write, and the API server makes no write later than
`WRITE_S` after that: before another process may lead.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import (
    ApiError,
    ConflictError,
    CredentialsError,
    ForbiddenError,
    NotFoundError,
    NotSentError,
    UnauthorizedError,
)
from gpuvirt.cluster.resources import pods
from gpuvirt.cluster.shares.index import Index
from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, pod_shares_text
from gpuvirt.model.shares.placement import Placement

log = logging.getLogger(__name__)

WRITE_S = 2.5
READ_S = 1.5
"""The longest wait for the write, and for reading the pod after a write that was not answered. kube-scheduler waits for
5 s in all."""
HOLD_S = 15.0
"""How long units stay reserved after a write whose outcome is unknown: the API server gives it up after `WRITE_S`, and
etcd ends what it has begun within 7 s (its requests' 5 s and two elections)."""
SETTLE_EVERY_S = 0.02
LOOK_S = 5.0
"""How often pods with such writes are read after that."""
_REFUSED = (NotSentError, NotFoundError, ForbiddenError, UnauthorizedError, CredentialsError)
"""Errors that say that the write was not made."""


class CannotBindError(GpuvirtError):
    """A pod cannot be bound as kube-scheduler asks; the text has the reason."""


class _BindingMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    namespace: str
    uid: str
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


@dataclass(frozen=True, slots=True)
class Write:
    """A binding that is to be written."""

    pod: SharingPod
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
            _BindingMetadata(metadata.name, metadata.namespace, metadata.uid, annotations), _Target(self.node)
        )


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A write whose outcome is not known, and the time after which it is not made any more."""

    write: Write
    until_s: float


class Writes:
    """The bindings that are being written, and those of unknown outcome."""

    def __init__(self, client: Client, index: Index, clock: Clock, may_write: Callable[[], bool]) -> None:
        self._client = client
        self._index = index
        self._clock = clock
        self._may_write = may_write
        """Whether this process has the lease at this moment."""
        self._under_way: set[tuple[PodUid, NodeName]] = set()
        self._unknown: dict[tuple[PodUid, NodeName], _Unknown] = {}

    @property
    def under_way(self) -> int:
        """The number of bindings whose answer has not come yet."""
        return len(self._under_way)

    def is_under_way(self, pod: PodUid, node: NodeName) -> bool:
        """Return whether a binding is being written."""
        return (pod, node) in self._under_way

    def is_unknown(self, pod: PodUid, node: NodeName) -> bool:
        """Return whether it is not known if a binding was made."""
        return (pod, node) in self._unknown

    async def settled(self) -> None:
        """Wait until no binding is under way; no longer than one can take."""
        deadline_s = self._clock.monotonic_s() + WRITE_S + READ_S
        while self._under_way and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(SETTLE_EVERY_S)

    async def make(self, write: Write) -> None:
        """Write a binding whose units are reserved; raise CannotBindError."""
        self._under_way.add(write.key)
        try:
            await self._write(write)
        finally:
            self._under_way.discard(write.key)

    async def read(self, namespace: str, name: str) -> SharingPod:
        """Return a pod as the API server has it; raises ApiError, TimeoutError."""
        async with asyncio.timeout(READ_S):
            return await self._client.get(pods(namespace), name, SharingPod)

    async def _write(self, write: Write) -> None:
        """Write a binding; raise CannotBindError. What is reserved is freed where the write was certainly not made."""
        pod, node = write.pod, write.node
        resource, name, content = pods(pod.metadata.namespace), pod.metadata.name, write.content
        try:
            async with asyncio.timeout(WRITE_S):
                await self._client.create_part(
                    resource, name, "binding", content, within_s=WRITE_S, may_send=self._may_write
                )
        except _REFUSED as error:
            if write.key not in self._unknown:  # an earlier try may still be made
                self._free(write)
            raise CannotBindError(f"pod {pod.where} was not bound to node {node}: {error}") from error
        except (ApiError, TimeoutError) as error:
            await self._settle(write, error)
        self._unknown.pop(write.key, None)
        log.info(
            "bound a pod",
            extra={"pod": pod.where, "node": node, "gpus": ",".join(sorted(write.chosen.used)) or None},
        )

    async def _settle(self, write: Write, error: Exception) -> None:
        """Find out whether a write was made that was answered by an error or not at all; raise CannotBindError."""
        pod, node = write.pod, write.node
        why = str(error) or "the API server did not answer in time"
        failed = f"pod {pod.where} was not bound to node {node}: {why}"
        try:
            found = await self.read(pod.metadata.namespace, pod.metadata.name)
        except NotFoundError:
            self._free(write)
            raise CannotBindError(f"{failed}; the pod is gone") from error
        except (ApiError, TimeoutError):
            self._hold(write)
            raise CannotBindError(f"{failed}; whether it is bound is not known, since it cannot be read") from error
        if found.uid == pod.uid and found.spec.node_name == node:
            log.info("pod %s is bound to node %s, although the API server answered: %s", pod.where, node, why)
            return
        if found.uid != pod.uid or found.spec.node_name or isinstance(error, ConflictError):
            self._free(write)
        else:
            self._hold(write)  # the API server may still make the write
        raise CannotBindError(failed) from error

    def _free(self, write: Write) -> None:
        self._unknown.pop(write.key, None)
        self._index.release(*write.key)

    def _hold(self, write: Write) -> None:
        """Keep the units reserved for as long as the API server may still make the write."""
        self._unknown[write.key] = _Unknown(write, self._clock.monotonic_s() + HOLD_S)

    async def run(self) -> None:
        """Find out, for ever, which of the writes of unknown outcome were made; the units of the others are freed."""
        while True:
            await self._clock.sleep(LOOK_S)
            for unknown in tuple(self._unknown.values()):
                if unknown.until_s <= self._clock.monotonic_s():
                    await self._look(unknown)

    async def _look(self, unknown: _Unknown) -> None:
        """Read the pod of a write that is not made any more; where it cannot be read, its units stay reserved."""
        write = unknown.write
        metadata = write.pod.metadata
        try:
            found = await self.read(metadata.namespace, metadata.name)
            is_made = found.uid == write.pod.uid and found.spec.node_name == write.node
        except NotFoundError:
            is_made = False
        except (ApiError, TimeoutError) as error:
            log.info("whether pod %s is bound to node %s is still not known: %s", write.pod.where, write.node, error)
            return
        if write.key not in self._under_way and self._unknown.get(write.key) is unknown:
            del self._unknown[write.key]
            if not is_made:
                self._index.release(*write.key)

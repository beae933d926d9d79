"""The verb bind: gives a pod its node and its GPUs in one write, or says why not.

A Binding's annotations are merged into the pod in the transaction that sets its node, and its UID is a precondition
(Kubernetes, pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata): so a pod is bound with its GPUs or not at
all, and no right to patch pods is needed. The decision and the reservation are one turn of the event loop, so that no
other binding comes between them. The lease is checked again when the connection is there, right before the write, and
the API server makes no write later than `WRITE_S` after that: before another process may lead.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.extender.protocol import BindingArguments
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
from gpuvirt.cluster.shares.objects import SharingPod, demand_of_pod
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, pod_shares_text
from gpuvirt.model.shares.placement import Placement
from gpuvirt.model.shares.wording import requested_text

log = logging.getLogger(__name__)

OBSERVE_S = 1.0
"""How long a pod that kube-scheduler has observed may be unknown here; both watch the same API server."""
OBSERVE_EVERY_S = 0.02
WRITE_S = 2.5
READ_S = 1.5
"""The longest wait for the write, and for reading the pod after a write that was not answered. kube-scheduler waits for
5 s in all."""
HOLD_S = 15.0
"""How long units stay reserved after a write whose outcome is unknown: the API server gives it up after `WRITE_S`, and
etcd ends what it has begun within 7 s (its requests' 5 s and two elections)."""
_REFUSED = (NotSentError, NotFoundError, ForbiddenError, UnauthorizedError, CredentialsError)
"""Errors that say that the write was not made."""

NOT_LEADING = "this replica of the extender does not lead, or not yet; kube-scheduler tries again"


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
class _Write:
    """A binding that is to be written."""

    pod: SharingPod
    node: NodeName
    chosen: Placement

    @property
    def key(self) -> tuple[PodUid, NodeName]:
        return self.pod.uid, self.node

    @property
    def content(self) -> Binding:
        metadata = self.pod.metadata
        annotations = {SHARES_ANNOTATION: pod_shares_text(self.chosen)} if self.chosen.containers else {}
        return Binding(
            _BindingMetadata(metadata.name, metadata.namespace, metadata.uid, annotations), _Target(self.node)
        )


class Binder:
    """Binds pods for as long as this process leads."""

    def __init__(
        self, client: Client, index: Index, sharing: Sharing, clock: Clock, may_write: Callable[[], bool]
    ) -> None:
        self._client = client
        self._index = index
        self._sharing = sharing
        self._clock = clock
        self._may_write = may_write
        """Whether this process has the lease at this moment."""
        self._under_way: set[tuple[PodUid, NodeName]] = set()
        self._unknown: dict[tuple[PodUid, NodeName], float] = {}
        """Writes whose outcome is not known, and until when their units stay reserved."""
        self._of_earlier_terms: frozenset[tuple[PodUid, NodeName]] = frozenset()

    @property
    def under_way(self) -> int:
        """The number of bindings whose answer has not come yet."""
        return len(self._under_way)

    def begin_term(self) -> None:
        """Count what earlier terms of this process have reserved, and send none of it again.

        The API server may still make their writes, and another leader may have given their units to other pods.
        """
        self._of_earlier_terms = self._index.reservations

    async def settled(self) -> None:
        """Wait until no binding is under way; no longer than one can take."""
        deadline_s = self._clock.monotonic_s() + WRITE_S + READ_S
        while self._under_way and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(OBSERVE_EVERY_S)

    async def bind(self, asked: BindingArguments) -> None:
        """Bind a pod to a node; raise CannotBindError."""
        pod = await self._observed(asked)
        write = self._decided(pod, asked.node)
        if write is None:
            return
        self._under_way.add(write.key)
        try:
            await self._write(write)
        finally:
            self._under_way.discard(write.key)
            self._end_hold(write.key)

    async def _observed(self, asked: BindingArguments) -> SharingPod:
        """Return the pod once it has been observed; raise CannotBindError."""
        deadline_s = self._clock.monotonic_s() + OBSERVE_S
        while (pod := self._index.pod(asked.namespace, asked.name)) is None or pod.uid != asked.uid:
            if self._clock.monotonic_s() >= deadline_s:
                raise CannotBindError(await self._why_unknown(asked))
            await self._clock.sleep(OBSERVE_EVERY_S)
        return pod

    async def _why_unknown(self, asked: BindingArguments) -> str:
        where = f"pod {asked.namespace}/{asked.name}"
        try:
            async with asyncio.timeout(READ_S):
                pod = await self._client.get(pods(asked.namespace), asked.name, SharingPod)
        except NotFoundError:
            return f"{where} is gone"
        except (ApiError, TimeoutError) as error:
            return f"{where} is not known here yet, and cannot be read: {str(error) or 'no answer in time'}"
        if pod.uid != asked.uid:
            return f"{where} has the UID {pod.uid}; expected {asked.uid}: the pod was replaced"
        if not pod.names(self._sharing.resource):
            return f"{where} requests no {self._sharing.resource}; kube-scheduler should bind it itself"
        return f"{where} is not known here yet; kube-scheduler will try again"

    def _decided(self, pod: SharingPod, node: NodeName) -> _Write | None:
        """Return the binding to write, whose units are then reserved; None for a pod that is bound as desired.

        Raises CannotBindError. Nothing is awaited here: the books do not change before the reservation.
        """
        if not self._may_write():
            raise CannotBindError(NOT_LEADING)
        if pod.spec.node_name == node:
            return None
        if pod.spec.node_name:
            raise CannotBindError(f"pod {pod.where} is bound to node {pod.spec.node_name} already, not to {node}")
        if (pod.uid, node) in self._under_way:
            raise CannotBindError(f"pod {pod.where} is being bound to node {node}")
        sent = self._index.reserved(pod.uid, node)
        if sent is not None and (pod.uid, node) in self._of_earlier_terms:
            raise CannotBindError(
                f"pod {pod.where} may be bound to node {node} by an earlier request; kube-scheduler tries again"
            )
        if sent is not None:
            return _Write(pod, node, sent)  # it may be made already: another try has the same GPUs
        try:
            demand = demand_of_pod(pod, self._sharing.resource, self._sharing.whole)
        except GpuvirtError as error:
            raise CannotBindError(f"pod {pod.where}: {error}") from error
        if not demand.containers:
            return _Write(pod, node, Placement({}, {}))
        books = self._index.books_for(pod, node)
        sharing = self._sharing
        chosen = books.place(demand, sharing.policy_of(pod), sharing.whole) if books is not None else None
        if chosen is None:
            largest = f"its largest free piece is {books.largest}" if books is not None else "it shares no GPUs"
            raise CannotBindError(
                f"pod {pod.where} does not fit on node {node}: {requested_text(demand)} of {self._sharing.resource}"
                f" requested, {largest}"
            )
        self._index.reserve(pod, node, chosen)
        self._of_earlier_terms -= {(pod.uid, node)}
        return _Write(pod, node, chosen)

    async def _write(self, write: _Write) -> None:
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

    async def _settle(self, write: _Write, error: Exception) -> None:
        """Find out whether a write was made that was answered by an error or not at all; raise CannotBindError."""
        pod, node = write.pod, write.node
        why = str(error) or "the API server did not answer in time"
        failed = f"pod {pod.where} was not bound to node {node}: {why}"
        try:
            async with asyncio.timeout(READ_S):
                found = await self._client.get(pods(pod.metadata.namespace), pod.metadata.name, SharingPod)
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

    def _free(self, write: _Write) -> None:
        self._unknown.pop(write.key, None)
        self._index.release(*write.key)

    def _hold(self, write: _Write) -> None:
        """Keep the units reserved for as long as the API server may still make the write."""
        self._unknown[write.key] = self._clock.monotonic_s() + HOLD_S
        self._clock.call_later(HOLD_S, lambda: self._end_hold(write.key))

    def _end_hold(self, key: tuple[PodUid, NodeName]) -> None:
        until_s = self._unknown.get(key)
        if until_s is not None and until_s <= self._clock.monotonic_s() and key not in self._under_way:
            del self._unknown[key]
            self._index.release(*key)

"""The pods of the agent's node that request units: their GPUs are read from an annotation, and written back to it.

The extender writes the annotation with its binding. The agent writes that of a pod that no extender has placed, or that
got other GPUs. It patches the pod's status, by which Kubernetes lets annotations be written but neither containers nor
the node (podStatusStrategy in registry/core/pod), and names the UID, so that a new pod of the same name is left alone.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from gpuvirt.agent.cluster.gpunode import REPORTER
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.agent.shares.nodeshares import NodePods, NodeShares, Refusal, RefusalKey, ShareRefusals
from gpuvirt.clock import Signal
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube import events
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.events import About, EventDraft, EventLevel, Reporter
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError
from gpuvirt.kube.kinds.core import ENDED, STATIC_POD, AnyObject
from gpuvirt.kube.resources import Collection, Resource, pods
from gpuvirt.model.shares.annotations import (
    MEMORY_ANNOTATION,
    POLICY_ANNOTATION,
    SHARES_ANNOTATION,
    SOFT,
    InvalidAnnotationError,
    enforcement_of,
    pod_shares,
    pod_shares_text,
)
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.placement import Policy
from gpuvirt.shares.confinement import ConfinedPod, Handlers, RuntimeClass, handlers_of, why_unconfined
from gpuvirt.shares.objects import PodStatus, demand_of_pod, needs_limits
from gpuvirt.shares.sharing import Sharing

log = logging.getLogger(__name__)


class _Status(PodStatus, frozen=True, gc=False):
    phase: str = ""


class RequestingPod(ConfinedPod, frozen=True):
    """A pod with the requests of its containers, and whether they have ended."""

    status: _Status = _Status()

    @property
    def kubelet_uid(self) -> PodUid:
        """The UID that the kubelet has for the pod."""
        return PodUid(self.metadata.annotations.get(STATIC_POD) or self.metadata.uid)

    @property
    def has_ended(self) -> bool:
        """Whether the pod has run, so that the scheduler counts it no more."""
        return self.status.phase in ENDED

    @property
    def is_ending(self) -> bool:
        """Whether the pod has ended or is being deleted."""
        return self.has_ended or bool(self.metadata.deletion_timestamp)


class _Written(NamedTuple):
    """An annotation that was written, and the one that was observed before."""

    before: str | None
    text: str


class _PatchMetadata(msgspec.Struct, frozen=True):
    uid: str
    annotations: dict[str, str]


class _Patch(msgspec.Struct, frozen=True):
    metadata: _PatchMetadata


class Due(NamedTuple):
    """A pod whose annotation is not what its containers have."""

    pod: PodOnNode
    text: str


def node_pods(node: str) -> Collection[RequestingPod]:
    """Return the collection of all pods of a node."""
    return Collection(Resource("pods"), RequestingPod, on_node=node)


def pod_on_node(pod: RequestingPod, sharing: Sharing, handlers: Handlers | None) -> PodOnNode | None:
    """Return a pod that requests units, None for another pod, and for one whose request no GPU can serve."""
    try:
        demand = demand_of_pod(pod, sharing.resource, sharing.whole)
    except GpuvirtError as error:
        log.warning("pod %s gets no share: %s", pod.where, error)
        return None
    if not demand.containers:
        return None
    text = pod.metadata.annotations.get(SHARES_ANNOTATION) or None
    try:
        desired = pod_shares(text, demand, sharing.whole) if text is not None else None
    except InvalidAnnotationError as error:
        log.warning("the annotation of pod %s does not count: %s", pod.where, error)
        desired = None
    try:
        requires = needs_limits(pod, demand, sharing.whole)
    except InvalidAnnotationError:
        requires = True  # and it does not start: `why_unconfined` says why
    policy = pod.metadata.annotations.get(POLICY_ANNOTATION)
    return PodOnNode(
        pod.uid,
        pod.metadata.namespace,
        pod.metadata.name,
        demand,
        desired,
        Policy(policy) if policy in set(Policy) else None,
        ended=pod.status.phase in ENDED,
        annotation=text,
        requires_limits=requires,
        unconfined=why_unconfined(pod, sharing, handlers),
        soft_memory=pod.metadata.annotations.get(MEMORY_ANNOTATION) == SOFT,
    )


class PodShareKeeper:
    """Follows the pods of one node, and keeps the annotations of those that have shares."""

    def __init__(self, dependencies: KeeperDependencies, shares: NodeShares) -> None:
        self._dependencies = dependencies
        self._shares = shares
        self._sharing = Sharing(shares.resource, shares.whole)
        self._handlers: Handlers | None = None
        self._written: dict[PodUid, _Written] = {}
        self._observed: dict[PodUid, tuple[RequestingPod, PodOnNode | None]] = {}
        """The pods as observed, with the values that were read from them."""

    def observe(self, delta: Delta[RequestingPod]) -> None:
        """Record the pods of the node; a pod that has not changed is not read again."""
        before, self._observed = self._observed, {}
        for pod in delta.objects.values():
            uid = pod.uid
            known = before.get(uid)
            if known is None or known[0] != pod:
                known = pod, pod_on_node(pod, self._sharing, self._handlers)
            self._observed[uid] = known
        self._written = {uid: written for uid, written in self._written.items() if uid in self._observed}
        self._show()

    def observe_classes(self, delta: Delta[RuntimeClass]) -> None:
        """Record the RuntimeClasses of the cluster, by which pods that require limits are judged again."""
        self._handlers = handlers_of(delta.objects.values())
        for uid, (pod, _) in self._observed.items():
            self._observed[uid] = pod, pod_on_node(pod, self._sharing, self._handlers)
        self._show()

    def _show(self) -> None:
        self._shares.pods.observe({uid: found for uid, (_, found) in self._observed.items() if found is not None})

    async def run(self, report: ReportOutcome) -> None:
        """Write the annotations whenever they differ; `report` gets each error, and None after a success."""
        due = Signal()
        with self._shares.pods.cell.notifying(due), self._shares.store.records.notifying(due):
            await self._dependencies.keep(self._lacking, self._write, report, due)

    def _lacking(self) -> Due | None:
        return next(self._all_lacking((self._shares.pods.known or {}).values()), None)

    def _all_lacking(self, found: Iterable[PodOnNode]) -> Iterator[Due]:
        records = self._shares.store.records.get().pods
        for pod in found:
            record = records.get(pod.uid)
            if record is None or pod.ended:
                continue
            has = record.placement
            is_placed = pod.desired is not None and pod.desired.containers == has.containers
            if is_placed and enforcement_of(pod.annotation) == record.enforcement:
                continue
            text = pod_shares_text(has, record.enforcement)
            if self._written.get(pod.uid) != _Written(pod.annotation, text):
                yield Due(pod, text)

    async def _write(self, due: Due) -> None:
        pod, text = due
        patch = _Patch(_PatchMetadata(pod.uid, {SHARES_ANNOTATION: text}))
        client = self._dependencies.client
        try:
            await client.patch(pods(pod.namespace), pod.name, patch, PatchType.MERGE, AnyObject, part="status")
        except (NotFoundError, ConflictError) as error:
            log.info("pod %s/%s is gone, or another of its name: %s", pod.namespace, pod.name, error)
        else:
            log.info("wrote the GPUs of pod %s/%s: %s", pod.namespace, pod.name, text)
        self._written[pod.uid] = _Written(pod.annotation, text)


AGAIN_S = 600.0
"""The time between two events about one pod and reason."""
RETRY_S = 30.0
"""The time after which an event that could not be written is tried again, unless its pod is refused again before."""


class PodEvents:
    """Writes events about the pods of one node whose share was refused when a container started.

    The kubelet tries again for as long as the pod exists. An event is written when a pod is first refused for a reason,
    and again while that lasts, since the API server forgets events after an hour. An event that could not be written is
    tried again until it is, or its pod is gone. No answer to the kubelet waits for an event.
    """

    def __init__(self, dependencies: KeeperDependencies, refusals: ShareRefusals, pods: NodePods) -> None:
        self._dependencies = dependencies
        self._refusals = refusals
        self._pods = pods
        self._unwritten: dict[RefusalKey, Refusal] = {}
        self._written_s: dict[RefusalKey, float] = {}
        """When the latest event about a pod and reason was written."""

    async def run(self, report: ReportOutcome) -> None:
        """Write events, until cancelled; `report` gets each error, and None after a success."""
        due = Signal()
        with self._refusals.added.notifying(due):
            failed = False
            while True:
                self._take()
                error = await self._write_all()
                if error is not None or failed:
                    report(error)
                failed = error is not None
                if self._unwritten:
                    await due.wait_for(self._dependencies.clock, RETRY_S)
                else:
                    await due.wait()

    def _take(self) -> None:
        """Record new refusals, and forget those of pods that are gone, and old events."""
        now_s, known = self._dependencies.clock.monotonic_s(), self._pods.known or {}
        self._written_s = {key: at_s for key, at_s in self._written_s.items() if now_s - at_s < AGAIN_S}
        found = {**self._unwritten, **{refusal.key: refusal for refusal in self._refusals.take()}}
        self._unwritten = {
            key: refusal for key, refusal in found.items() if key not in self._written_s and key.pod in known
        }

    async def _write_all(self) -> ApiError | None:
        """Write the events that are due; return the error of the first that fails."""
        for refusal in tuple(self._unwritten.values()):
            try:
                await self._write(refusal)
            except ApiError as error:
                return error
            self._written_s[refusal.key] = self._dependencies.clock.monotonic_s()
            del self._unwritten[refusal.key]
        return None

    async def _write(self, refusal: Refusal) -> None:
        pod, clock = refusal.pod, self._dependencies.clock
        about = About("v1", "Pod", pod.name, pod.uid, pod.namespace)
        draft = EventDraft(EventLevel.WARNING, refusal.reason.code, refusal.reason.text)
        event = events.event_of(draft, about, Reporter(REPORTER, self._dependencies.node), clock.now())
        try:
            await events.create(self._dependencies.client, event)
        except (NotFoundError, ConflictError) as error:
            log.info("no event about pod %s/%s: %s", pod.namespace, pod.name, error)

"""The controller while it leads: it watches the cluster's objects, decides after each change, and writes the result."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from random import Random
from typing import TypeVar

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.controller.announcer import Announcer
from gpuvirt.controller.decisions import Decisions, basis_of, decide_from, slices
from gpuvirt.controller.deployment import DIGEST_ANNOTATION, Existing, Mark, StoredObject
from gpuvirt.controller.kubevirt.decisions import (
    Histories,
    KubeVirtObserved,
    PatchKubeVirt,
    history_key,
    kept_histories,
    kept_text,
)
from gpuvirt.controller.nodememory import DecidedNodes
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, ScheduledConfigs
from gpuvirt.controller.picture import Picture, read_of, read_of_gpu_node, read_of_pod
from gpuvirt.controller.policy.policies import InvalidValue
from gpuvirt.controller.scheduler import EXTENDER
from gpuvirt.controller.schedulespart import Follower, ScheduledSource
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.store import AnyStore, Store
from gpuvirt.controller.writer import ObjectWriter, Write, logged
from gpuvirt.controller.writes import ApplyGpuNode, ApplyObject, DeleteObject, PatchNode, PatchPolicyStatus, WriteTarget
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import DURATION_S, Lease
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, StoredPolicy
from gpuvirt.kube.kinds.core import Pod, ReadNode, Service
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, KUBEVIRTS, HyperConverged, KubeVirt
from gpuvirt.kube.kinds.workloads import made_in
from gpuvirt.kube.labels import OPERAND_LABEL
from gpuvirt.kube.objects import PARTS, ObjectKey
from gpuvirt.kube.reflector import ApiGroups
from gpuvirt.kube.resources import (
    NODES,
    Collection,
    FullObject,
    KubernetesObject,
    Metadata,
    Resource,
    config_maps,
    pods,
    services,
)
from gpuvirt.model.desired.observed import Observed
from gpuvirt.tasks import keep_going

T = TypeVar("T", bound=KubernetesObject)
F = TypeVar("F", bound=FullObject)


class KubeVirtStores:
    """One store for each kind."""

    def __init__(self, changed: Signal) -> None:
        self._kubevirts = Store(Collection(KUBEVIRTS, KubeVirt), changed)
        self._hyper_convergeds = Store(Collection(HYPER_CONVERGEDS, HyperConverged), changed)
        self._requesting = {kind.name: Store(kind.collection, changed) for kind in DEVICE_KINDS}
        self.all: tuple[AnyStore, ...] = (self._kubevirts, self._hyper_convergeds, *self._requesting.values())

    def observed(self, histories: Histories, kept: str | None) -> KubeVirtObserved:
        """Return the observed state; `histories` and `kept` are the history of the controller's patches."""
        unlisted = (store.problem for store in self.all if not store.is_observed and store.problem is not None)
        requesting = {name: _observed(store) for name, store in self._requesting.items()}
        return KubeVirtObserved(
            kubevirts=self._kubevirts.objects,
            hyper_convergeds=_observed(self._hyper_convergeds),
            requesting={name: observed for name, observed in requesting.items() if observed is not None},
            histories=histories,
            problems=tuple(map(str, unlisted)),
            kept=kept,
        )

    async def patch(self, client: Client, write: PatchKubeVirt) -> Metadata:
        """Send a patch, store the patched object, and return its metadata; raises ApiError."""
        if write.target.resource == HYPER_CONVERGEDS:
            return await _patch(client, self._hyper_convergeds, write)
        return await _patch(client, self._kubevirts, write)


async def _patch(client: Client, store: Store[F], write: PatchKubeVirt) -> Metadata:
    target, operations = write.target, write.plan.writes
    found = await client.patch(target.resource, target.name, operations, PatchType.JSON, store.collection.shape)
    store.take(found)
    return found.metadata


def _observed(store: Store[T]) -> Observed[tuple[T, ...]] | None:
    """Return the objects of a kind: None if they are not observed, `Observed(None)` if the kind is not installed."""
    if not store.installed:
        return Observed(None)
    return Observed(tuple(store.objects.values())) if store.objects is not None else None


LEASE = "53822513.nvidia.com"
"""The lease of NVIDIA's operator in all its versions. Its Deployment may have any name, and may be scaled to zero; a
lease that is being renewed proves that it runs. Source: gpu-operator's leader election.
"""
QUIET_S = 4.0 * DURATION_S
"""A lease that names a holder counts as renewed until it has not changed for this time."""


def its_leases() -> Collection[Lease]:
    """Return the collection of the operator's leases in all namespaces."""
    return Collection(Resource("leases", "coordination.k8s.io", "v1"), Lease, LEASE)


class OtherOperator:
    """The observed leases of NVIDIA's operator."""

    def __init__(self) -> None:
        self._observed: dict[ObjectKey, tuple[Lease, float]] = {}
        """Each lease as last observed, and when its current state was first observed."""

    def observe(self, delta: Delta[Lease], now_s: float) -> None:
        """Store the leases, and the time of those that have changed."""
        fresh = {key: delta.objects[key] for key in delta.changed if key in delta.objects}
        self._observed = {key: seen for key, seen in self._observed.items() if key in delta.objects}
        self._observed |= {key: (lease, now_s) for key, lease in fresh.items()}

    def active(self, now_s: float) -> str | None:
        """Return the lease that the operator renews, with its holder; None if none is being renewed."""
        for key, (lease, since_s) in sorted(self._observed.items()):
            if lease.spec.holder_identity and now_s - since_s < QUIET_S:
                return f"lease {key.namespace}/{key.name}, held by {lease.spec.holder_identity}"
        return None


log = logging.getLogger(__name__)

PAUSE_S = 0.2
"""The longest pause between two decisions. Watch events come in bursts, and the next decision takes them together."""
LEAST_PAUSE_S = 0.02
PAUSE_PER_DECISION = 20
"""The pause is that many times as long as the decision has taken: decisions take a twentieth of the processor."""
MOST_PAUSE_S = 30.0
"""The longest time between two decisions without a change: some decisions depend on elapsed time."""
ROUND_S = 600.0
"""The time in which each node is decided again, changed or not, some at a time."""


class ControllerDependencies(msgspec.Struct, frozen=True):
    """The API client, the clock and the randomness that the controller uses."""

    client: Client
    clock: Clock
    random: Random


class Controller:
    """One term as the leader. It starts with empty stores, and decides nothing until all collections are observed."""

    def __init__(
        self,
        dependencies: ControllerDependencies,
        settings: ControllerSettings,
        scheduled: ScheduledSource | None = None,
    ) -> None:
        """`scheduled` is where VgpuSchedules are read; None if this controller runs none."""
        self.decisions: Decisions | None = None
        """The latest decisions."""
        self._dependencies = dependencies
        self._settings = settings
        self._changed = Signal()
        self._writer = ObjectWriter(self._write, dependencies.clock, dependencies.random)
        self._announcer = Announcer(dependencies.client, dependencies.clock)
        self._memory = DecidedNodes()
        self._since_s = dependencies.clock.monotonic_s()
        self._forgotten = 0
        """How many parts of the nodes were forgotten since then."""
        self._policies = Store(Collection(CLUSTER_POLICIES, StoredPolicy), self._changed)
        self._nodes = Store(Collection(NODES, ReadNode), self._changed, self._observe_nodes, read_of)
        self._gpu_nodes = Store(
            Collection(GPU_NODES, OwnedGpuNode), self._changed, self._observe_gpu_nodes, read_of_gpu_node
        )
        self._follower: Follower | None = None
        self._made = {store.resource: store for store in self._stores_of_made()}
        self._marks: dict[WriteTarget, Mark] = {}
        self._kubevirt = KubeVirtStores(self._changed)
        self._histories: Histories | None = None
        """The history of patches of KubeVirt; None until its ConfigMap has been observed."""
        self._pods = Store(Collection(pods(settings.namespace), Pod), self._changed, reads=read_of_pod)
        self._other = OtherOperator()
        self._scheduled = scheduled
        self._next_switch: datetime | None = None
        """When a VgpuSchedule changes vGPU configs next, by the latest picture."""
        leases = Store(its_leases(), self._changed, self._observe_lease)
        self._services = Store(Collection(services(settings.namespace), Service, name=EXTENDER), self._changed)
        self._stores: tuple[AnyStore, ...] = (
            self._policies,
            self._nodes,
            self._gpu_nodes,
            self._pods,
            leases,
            *self._made.values(),
            *((self._services,) if settings.shared is not None else ()),
            *((scheduled.store(self._changed),) if scheduled is not None else ()),
        )
        """The controller decides once all of these are observed. A KubeVirt kind that is not is reported instead."""

    def _stores_of_made(self) -> Iterator[Store[StoredObject]]:
        """Yield the stores of operands' objects. That of ConfigMaps has all of them, since a policy may name any."""
        for resource in made_in(self._settings.namespace):
            labelled = "" if resource.plural == "configmaps" else OPERAND_LABEL
            yield Store(Collection(resource, StoredObject, labelled=labelled), self._changed)

    def follow(self, follower: Follower) -> None:
        """Let a follower take what is observed now, and each change; the last one alone."""
        self._follower = follower
        if self._nodes.objects is not None:
            follower.observe_nodes(Delta(self._nodes.objects))
        if self._gpu_nodes.objects is not None:
            follower.observe_gpu_nodes(Delta(self._gpu_nodes.objects))
        self._changed.set()  # the next decision has a picture for it

    def _observe_nodes(self, delta: Delta[ReadNode]) -> None:
        if self._follower is not None:
            self._follower.observe_nodes(delta)

    def _observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        if self._follower is not None:
            self._follower.observe_gpu_nodes(delta)

    @property
    def writes_done(self) -> int:
        """How many writes have succeeded in this term."""
        return self._writer.done

    @property
    def writes_failed(self) -> int:
        """How many writes have failed in this term."""
        return self._writer.failed

    async def run(self) -> None:
        """Lead until cancelled; each task that fails is restarted by itself."""
        client, clock, random = self._dependencies.client, self._dependencies.clock, self._dependencies.random
        groups = ApiGroups(client, clock)
        async with asyncio.TaskGroup() as group:
            for store in (*self._stores, *self._kubevirt.all):
                self._start(group, store.resource.plural, partial(store.follow, client, clock, random, groups))
            for name, run in (
                ("decide", self._decide),
                ("write", self._writer.run),
                ("follow writes", self._follow_writes),
            ):
                self._start(group, name, run)

    def _start(self, group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]) -> None:
        group.create_task(keep_going(f"controller: {name}", run, self._dependencies.clock))

    def _observe_lease(self, delta: Delta[Lease]) -> None:
        self._other.observe(delta, self._dependencies.clock.monotonic_s())

    async def _follow_writes(self) -> None:
        """Request a new decision whenever a write succeeds or fails."""
        while True:
            await self._writer.changed.wait()
            self._changed.set()

    async def _decide(self) -> None:
        while True:
            await self._changed.wait_for(self._dependencies.clock, self._pause_s())
            picture = self._picture()
            if picture is None:
                continue
            self._next_switch = picture.scheduled.next_switch
            if self._follower is not None:
                self._follower.observe_picture(picture)
            # Parts of the nodes that are due in the slow round are forgotten.
            due = int((self._dependencies.clock.monotonic_s() - self._since_s) * PARTS / ROUND_S)
            for number in range(max(self._forgotten, due - PARTS), due):
                self._memory.forget(number)
            self._forgotten = due
            began_s = self._dependencies.clock.monotonic_s()
            before, self.decisions = self.decisions, await self._decided(picture)
            log_invalid(before.progress.invalid if before is not None else (), self.decisions.progress.invalid)
            if self.decisions.histories is not None:
                self._histories = self.decisions.histories
            self._writer.offer(self.decisions.writes)
            await self._announcer.announce(self.decisions.announcements)
            took_s = self._dependencies.clock.monotonic_s() - began_s
            await self._dependencies.clock.sleep(min(max(took_s * PAUSE_PER_DECISION, LEAST_PAUSE_S), PAUSE_S))

    def _pause_s(self) -> float:
        """Return the longest time until the next decision: a switch of a VgpuSchedule is no change of an object."""
        if self._next_switch is None:
            return MOST_PAUSE_S
        left_s = (self._next_switch - self._dependencies.clock.now()).total_seconds()
        return min(max(left_s, LEAST_PAUSE_S), MOST_PAUSE_S)

    async def _decided(self, picture: Picture) -> Decisions:
        """Return the decisions from a picture; other tasks have their turns between the slices of the nodes."""
        now, failures, memory = self._dependencies.clock.now(), self._writer.failures, self._memory
        basis = basis_of(picture, self._settings, now, memory)
        for _ in slices(basis, picture, memory):
            await self._dependencies.clock.sleep(0)
        return decide_from(basis, picture, self._settings, failures, now, memory)

    def _picture(self) -> Picture | None:
        """Return all observed objects; None until every collection has been observed."""
        if not all(store.is_observed for store in self._stores):
            return None
        stored = {resource: store.known for resource, store in self._made.items()}
        other = self._other.active(self._dependencies.clock.monotonic_s())
        kept = stored[config_maps(self._settings.namespace)].get(history_key(self._settings.namespace))
        if self._histories is None:
            self._histories = kept_histories(kept)
        kubevirt = self._kubevirt.observed(self._histories, kept_text(kept))
        existing = Existing(stored, self._pods.known, self._marks)
        return Picture(
            self._policies.known,
            self._nodes.known,
            self._gpu_nodes.known,
            existing,
            other,
            kubevirt,
            self._services.known,
            self._scheduled.at(self._dependencies.clock.now()) if self._scheduled is not None else ScheduledConfigs(),
        )

    async def _write(self, write: Write) -> None:
        """Make one write, and store the object that the API server returns. Raises ApiError."""
        client, target = self._dependencies.client, write.target
        match write:
            case PatchNode(patch=patch):
                self._nodes.take(await client.patch(target.resource, target.name, patch, PatchType.MERGE, ReadNode))
            case ApplyGpuNode(content=content):
                self._gpu_nodes.take(await client.apply(target.resource, target.name, content, OwnedGpuNode))
            case ApplyObject(content=content):
                applied = await client.apply(target.resource, target.name, content, StoredObject)
                self._made[target.resource].take(applied)
                self._marks[target] = Mark(applied.metadata.annotations.get(DIGEST_ANNOTATION, ""), applied.version)
            case PatchKubeVirt(plan=plan):
                metadata = await self._kubevirt.patch(client, write)
                self._histories = {**(self._histories or {}), metadata.uid: plan.landed(metadata)}
            case DeleteObject(uid=uid):
                with suppress(NotFoundError, ConflictError):
                    await self._dependencies.client.delete(target.resource, target.name, uid)
                key = ObjectKey(target.resource.namespace or "", target.name)
                next(store for store in self._stores if store.resource == target.resource).drop(key)
            case PatchPolicyStatus(status=status):
                self._policies.take(
                    await client.patch(
                        target.resource, target.name, {"status": status}, PatchType.MERGE, StoredPolicy, part="status"
                    )
                )

    def problems(self) -> Iterator[ApiError]:
        """Return the errors of collections that the controller cannot watch."""
        return (store.problem for store in self._stores if store.problem is not None)


def log_invalid(before: Sequence[InvalidValue], now: Sequence[InvalidValue]) -> None:
    """Log each value that has become invalid, and each that is no longer invalid."""
    for value in now:
        if value not in before:
            extra = {"reason": value.code, "origin": value.origin, "node": value.node}
            log.warning("desired state: %s", logged(value.text), extra=extra)
    for value in before:
        if value not in now:
            log.info("desired state: no longer invalid: %s", logged(value.text))

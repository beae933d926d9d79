"""The shares of one node: the state that the agent's parts share, and the signals between them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.shares.limitfiles import NO_DAEMON, NO_LIBRARY, NO_PROGRAM, DriverLimits, LimitFiles, MpsLimits
from gpuvirt.agent.shares.sharefiles import RecordStore, SpecFiles
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.desired.settings import Enforcement, ShareSettings
from gpuvirt.model.node.shares import ObservedShares, ShareState
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.memoryregion import MemoryUses, PodMemory
from gpuvirt.model.shares.node.records import KeptShare, PodRecord, ShareRecords, with_gpus
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE


class NodePods:
    """Holds the pods, and wakes those who wait for one."""

    def __init__(self) -> None:
        self.cell: Cell[Mapping[PodUid, PodOnNode] | None] = Cell(None)
        """None until the API server has listed them."""

    @property
    def known(self) -> Mapping[PodUid, PodOnNode] | None:
        """The pods that are known, None until the API server has listed them."""
        return self.cell.get()

    def observe(self, pods: Mapping[PodUid, PodOnNode]) -> None:
        """Record all pods of the node that request units."""
        self.cell.set(pods)

    async def wait_for(self, uid: PodUid, clock: Clock, timeout_s: float) -> PodOnNode | None:
        """Return a pod as soon as the API server has reported it, None where it does not within `timeout_s`."""
        until_s = clock.monotonic_s() + timeout_s
        changed = Signal()
        with self.cell.notifying(changed):
            while True:
                if (pod := (self.known or {}).get(uid)) is not None:
                    return pod
                left_s = until_s - clock.monotonic_s()
                if left_s <= 0:
                    return None
                await changed.wait_for(clock, left_s)


log = logging.getLogger(__name__)


class RefusedCall(StrEnum):
    """The call of the kubelet that was refused."""

    ALLOCATE = "allocate"
    PRE_START = "pre-start"


class RefusedPod(msgspec.Struct, frozen=True):
    """The pod of a container that did not get its share."""

    uid: PodUid
    namespace: str
    name: str


class RefusalKey(NamedTuple):
    """Refusals with the same pod and code count as one for events."""

    pod: PodUid
    code: ReasonCode


class Refusal(msgspec.Struct, frozen=True):
    """The latest refusal of a pod with one code."""

    pod: RefusedPod
    reason: Reason

    @property
    def key(self) -> RefusalKey:
        """The pod and the code."""
        return RefusalKey(self.pod.uid, self.reason.code)


class ShareRefusals:
    """Counts refusals for metrics, and keeps those of pods until events about them are written.

    Allocate knows no pod: the kubelet fails the pod, and writes an event with the refusal. PreStartContainer knows the
    pod, and the kubelet calls it again and again, so that one refusal may occur thousands of times.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By step and the code of the reason."""
        self.added: Cell[int] = Cell(0)
        """How many refusals of pods were added."""
        self.pending: Mapping[RefusalKey, Refusal] = {}
        """The refusals of pods since the last `take`: at most one for each pod and code."""

    def add(self, step: RefusedCall, reason: Reason, pod: RefusedPod | None = None) -> None:
        """Count a refusal, and keep it for an event if its pod is known."""
        self.counts[step, reason.code] += 1
        if pod is not None:
            refusal = Refusal(pod, reason)
            self.pending = {**self.pending, refusal.key: refusal}
            self.added.set(self.added.get() + 1)

    def take(self) -> Sequence[Refusal]:
        """Return the pending refusals, and forget them."""
        taken, self.pending = tuple(self.pending.values()), {}
        return taken


class NodeShares(msgspec.Struct, frozen=True):
    """The parts of shares, as the parts of an agent share them."""

    store: RecordStore
    files: SpecFiles
    pods: NodePods
    """The pods of the node, by the API server's client."""
    state: Cell[ShareState] = msgspec.field(default_factory=lambda: Cell(ShareState()))
    """The last decisions about shares; any thread reads them."""
    observed: Cell[ObservedShares] = msgspec.field(default_factory=lambda: Cell(ObservedShares()))
    """The observations that decide about shares, without the records."""
    cdi_enabled: Callable[[], bool | None] = lambda: None
    """Reads the setting `enable_cdi` of the runtime's configuration; None where it is not set."""
    resource: ResourceName = UNITS_RESOURCE
    whole: Units = WHOLE
    limit_files: LimitFiles = NO_LIBRARY
    mps: MpsLimits = NO_DAEMON
    driver: DriverLimits = NO_PROGRAM
    pending: Cell[Mapping[PodUid, PodRecord]] = msgspec.field(default_factory=lambda: Cell({}))
    """The shares that are being given: not on disk yet."""
    used: Cell[MemoryUses] = msgspec.field(default_factory=lambda: Cell({}))
    """The memory that containers with limits use, by their own reports or by NVIDIA's driver."""
    shown: Cell[tuple[PodMemory, ...]] = msgspec.field(default_factory=lambda: Cell(()))
    """The same by pod, as the node's GpuNode shows it: it follows more slowly."""
    refusals: ShareRefusals = msgspec.field(default_factory=ShareRefusals)
    """The refused shares, for metrics and events."""

    @property
    def records(self) -> ShareRecords:
        """The shares of all pods, with those that are being given; any thread reads it.

        A share is on disk before it is no longer pending, so the pending ones are read first.
        """
        pending = self.pending.get()
        stored = self.store.records.get()
        return ShareRecords({**pending, **stored.pods}) if pending else stored

    @property
    def in_use(self) -> bool:
        """Whether GPUs are shared, or containers that run still have shares."""
        return bool(self.state.get().published.capacity) or bool(self.store.records.get().pods)

    @property
    def picture(self) -> ObservedShares:
        """The shares as observed by now; any thread reads them."""
        return replace(self.observed.get(), records=self.records)

    def why_unlimited(self, by: Enforcement) -> Reason | None:
        """Return why no container with part of a GPU would start: what is to limit it is missing."""
        try:
            if by.has_library:
                self.limit_files.ensure()
            if by.has_daemon:
                self.mps.ask()
        except AllocationRefusedError as error:
            return error.reason
        return None

    def observe_node(self, runtime: str, upgrade: str = "") -> None:
        """Record the version of the container runtime, `containerd://2.1.3`, and the label of a driver's upgrade."""
        seen = self.observed.get()
        if (runtime, upgrade) != (seen.runtime, seen.upgrade):
            self.observed.set(replace(seen, runtime=runtime, upgrade=upgrade))

    def follow(self, state: ShareState) -> None:
        """Show the last decisions, and wake those who follow them if they differ; new reasons are logged."""
        before, pods = self.state.get(), self.store.records.get().pods
        if state == before:
            return
        for reason in set(state.withheld) - set(before.withheld):
            log.warning("%s", reason.text, extra={"reason": str(reason.code)})
        for uid, kept in state.kept.items():
            if before.kept.get(uid) != kept and kept is not KeptShare.RECORDED and uid in pods:
                log.warning("pod %s/%s keeps its share of GPUs: %s", pods[uid].namespace, pods[uid].name, kept.text)
        self.state.set(state)

    @contextmanager
    def notifying(self, changed: Signal) -> Iterator[None]:
        """While the context lasts, set `changed` whenever shares, or what decides on them, may have changed."""
        with self.state.notifying(changed), self.observed.notifying(changed), self.store.records.notifying(changed):
            yield

    def with_gpus(self, consumers: Consumers) -> Consumers:
        """Return the allocated devices with the GPUs of shares in place of their units, for changes of GPUs."""
        return with_gpus(consumers, self.resource, self.records)


def stored_shares(
    path: Path, files: SpecFiles, worker: SerialWorker, settings: ShareSettings, limit_files: LimitFiles = NO_LIBRARY
) -> NodeShares:
    """Return the shares that the file `path` has; `worker` writes it."""
    store = RecordStore(path, worker)
    store.load(files.contents())
    resource, whole = ResourceName(settings.resource), Units(settings.units)
    return NodeShares(
        store,
        files,
        NodePods(),
        resource=resource,
        whole=whole,
        limit_files=limit_files,
    )

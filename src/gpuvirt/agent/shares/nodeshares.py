"""The shares of one node: the state that the agent's parts share, and the signals between them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.shares.limitfiles import NO_DAEMON, NO_LIBRARY, LimitFiles, MpsLimits
from gpuvirt.agent.shares.recordstore import RecordStore
from gpuvirt.agent.shares.refusals import ShareRefusals
from gpuvirt.agent.shares.specfiles import SpecFiles
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.desired.settings import ShareSettings
from gpuvirt.model.offers.deviceusers import GivenShares
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode
from gpuvirt.model.shares.node.memoryregion import MemoryUses, PodMemory
from gpuvirt.model.shares.node.nvidiacdi import NvidiaSpec
from gpuvirt.model.shares.node.records import PodRecord, ShareRecords, with_gpus
from gpuvirt.model.shares.node.sharestate import ShareState
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE, SharedGpus


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


class NodeShares(msgspec.Struct, frozen=True):
    """The parts of shares, as the parts of an agent share them."""

    store: RecordStore
    files: SpecFiles
    pods: NodePods
    """The pods of the node, by the API server's client."""
    state: Cell[ShareState] = msgspec.field(default_factory=lambda: Cell(ShareState()))
    """The shared GPUs; any thread reads it."""
    cdi_enabled: Callable[[], bool | None] = lambda: None
    """Reads the setting `enable_cdi` of the runtime's configuration; None where it is not set."""
    resource: ResourceName = UNITS_RESOURCE
    whole: Units = WHOLE
    limit_files: LimitFiles = NO_LIBRARY
    mps: MpsLimits = NO_DAEMON
    pending: Cell[Mapping[PodUid, PodRecord]] = msgspec.field(default_factory=lambda: Cell({}))
    """The shares that are being given: not on disk yet."""
    used: Cell[MemoryUses] = msgspec.field(default_factory=lambda: Cell({}))
    """The memory that containers with limits use, by their own reports."""
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
    def kept_texts(self) -> Mapping[str, str]:
        """Why pods that the API server lacks or calls ended keep their shares, by pod as text: `pod default/a`."""
        pods = self.store.records.get().pods
        return {
            f"pod {pods[uid].namespace}/{pods[uid].name}": kept.text
            for uid, kept in self.state.get().kept.items()
            if uid in pods
        }

    @property
    def in_use(self) -> bool:
        """Whether GPUs are shared, or containers that run still have shares."""
        return bool(self.state.get().published.capacity) or bool(self.store.records.get().pods)

    def observe_gpus(self, gpus: SharedGpus, minors: Mapping[GpuId, int], memory_mib: Mapping[GpuId, int]) -> None:
        """Record the GPUs in mode `shared`; while they are not known, the offered units stay as they are.

        What limits new pods counts at once, where it is known.

        `minors` are the numbers of the device nodes of all GPUs, since a restarted container may have one that is not
        shared any more. `memory_mib` is the memory of GPUs, where shares are limits.
        """
        if gpus.enforcement is None:
            return
        before = self.state.get().published
        if gpus.is_known:
            before = NodeSharing(gpus.capacity, whole=gpus.whole, minors=minors)
        memory = {**before.memory_mib, **memory_mib}
        self.publish(replace(before, memory_mib=memory, enforcement=gpus.enforcement))

    def publish(self, sharing: NodeSharing) -> None:
        """Record the GPUs to share, by the agent's observations of the host."""
        self.set(self.state.get().with_published(sharing))

    def set(self, state: ShareState) -> None:
        """Replace the state, and wake those who follow it if it is another one; new reasons are logged."""
        before = self.state.get()
        if state == before:
            return
        for reason in set(state.withheld) - set(before.withheld):
            log.warning("%s", reason.text, extra={"reason": str(reason.code)})
        self.state.set(state)

    @property
    def given(self) -> GivenShares:
        """The shares that pods have, as they are now; any thread reads it."""
        records, state = self.records, self.state.get()
        return GivenShares(records, state.kept, state.node.capacity, state.withheld)

    @contextmanager
    def notifying(self, changed: Signal) -> Iterator[None]:
        """While the context lasts, set `changed` whenever the displayed state of shares may have changed."""
        with self.state.notifying(changed), self.store.records.notifying(changed):
            yield

    def with_gpus(self, consumers: Consumers) -> Consumers:
        """Return the allocated devices with the GPUs of shares in place of their units, for changes of GPUs."""
        return with_gpus(consumers, self.resource, self.records)

    def observe_runtime(self, version: str) -> None:
        """Record the version of the container runtime by the Node object: `containerd://2.1.3`."""
        self.set(replace(self.state.get(), runtime=version))

    def judge(self, specs: Sequence[NvidiaSpec], *, cdi_enabled: bool | None) -> None:
        """Conclude which GPUs containers can get, from NVIDIA's CDI specs and the runtime's setting as they are now."""
        self.set(self.state.get().judged(specs, cdi_enabled=cdi_enabled))


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

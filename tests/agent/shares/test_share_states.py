"""Shares over any order of admissions, starts, failures, deletions, restarts and ends.

No GPU ever runs more than its units, and no container that runs loses its CDI spec.
"""

import asyncio
import itertools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.shares import sharefiles
from gpuvirt.agent.shares.limitfiles import MpsLimits
from gpuvirt.agent.shares.nodeshares import NodePods, NodeShares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies, ShareAllocator, UnitAllocation
from gpuvirt.agent.shares.sharefiles import RecordStore, SpecFiles
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.node import shares as nodeshares
from gpuvirt.model.node.shares import ObservedShares, PodReading, ShareState
from gpuvirt.model.reasons import Reason, refusals, sharing
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units, most_at_a_time
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.records import KeptShare, unit_id, why_kept
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import SimClock
from tests.agent.shares.opengpus import decide
from tests.agent.shares.sharednode import BOTH, GPUS, MINORS, nvidia_spec, spec_env
from tests.inlineworker import InlineWorker

LIMITED = replace(BOTH, memory_mib=dict.fromkeys(GPUS, 16_384))
INIT, SIDECAR, APP = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP
SHAPES = ((APP,), (INIT, APP), (SIDECAR, APP), (INIT, SIDECAR, APP, APP))


@dataclass
class Pod:
    """A pod that the kubelet has admitted."""

    known: PodOnNode
    allocations: Sequence[UnitAllocation]
    running: dict[ContainerName, GpuId] = field(default_factory=dict)
    """The containers that have started, with the GPU that each sees."""
    by_mps: dict[ContainerName, bool] = field(default_factory=dict)
    """Whether MPS limits the containers that have started."""
    reported: bool = True
    """Whether the API server has reported it."""
    forgotten: bool = False
    """Whether the kubelet's record lacks it: it was deleted by force."""


class Changes:
    """The GPUs that changes have, as the gate of each GPU knows them."""

    def __init__(self) -> None:
        self.changed: set[GpuId] = set()

    def why_closed(self, gpu: GpuId) -> Reason | None:
        del gpu  # a change by another process: only the gate knows it
        return None

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        for gpu in self.changed.intersection(gpus):
            raise RefusedError(refusals.changing(gpu, f"for {unit}"))
        record()


class MpsNode(MpsLimits, frozen=True):
    """The MPS daemon of the node, which ends and begins at any time."""

    roots: tuple[Path, ...] = ()
    pipes: Path = Path("/run/gpuvirt/mps/pipe")
    away: list[str] = msgspec.field(default_factory=list)
    """Why it does not answer; empty while it does."""

    @override
    def ensure(self, gpu: GpuId) -> str:
        for why in self.away:
            raise AllocationRefusedError(sharing.limit_not_possible(self.pipes, sharing.NoLimit.DAEMON, why))
        return str(self.pipes)


class Shares(RuleBasedStateMachine):
    """A node with two GPUs, whose kubelet, API server and agent fail at any time, and whose GPUs are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = Changes()
        self.folder = Path(mkdtemp())
        (self.folder / "cdi").mkdir()
        (self.folder / "cdi/nvidia.yaml").write_text(nvidia_spec(MINORS))
        self.loop = asyncio.new_event_loop()
        self.numbers = itertools.count(1)
        self.pods: dict[PodUid, Pod] = {}
        self.stale: list[UnitAllocation] = []
        """Allocations of ended pods, which the kubelet's record still has."""
        self.known = True
        self.visible = True
        self.capacity = LIMITED
        self.daemon = MpsNode()

    @override
    def teardown(self) -> None:
        self.loop.close()
        shutil.rmtree(self.folder)

    @initialize(enforcement=st.sampled_from((Enforcement.NONE, Enforcement.MPS)))
    def start_agent(self, enforcement: Enforcement) -> None:
        self.capacity = replace(self.capacity, enforcement=enforcement)
        self.restart_agent()

    @rule()
    def restart_agent(self) -> None:
        files = SpecFiles(self.folder / "cdi", (self.folder / "cdi",))
        store = RecordStore(self.folder / sharefiles.FILE, InlineWorker())
        store.load(files.contents())
        self.api = NodePods()
        state, observed = ShareState(self.capacity, node=self.capacity), ObservedShares(runtime="containerd://2.4.2")
        self.shares = NodeShares(store, files, self.api, Cell(state), Cell(observed), mps=self.daemon)
        accounts = Accounts(self.recorded, self.running)
        clock, worker, shares = SimClock(), InlineWorker(), self.shares
        on = Dependencies(shares, clock, worker, accounts, self.claims, lambda: decide(shares), room_s=0, pod_s=0)
        self.allocator = ShareAllocator(on)
        self.names = itertools.count(1)

    @rule()
    def lose_records(self) -> None:
        """The file is damaged, and the agent starts again; the specs of the containers are still on the host."""
        file = self.folder / sharefiles.FILE
        if file.exists():
            file.write_bytes(file.read_bytes()[:-9])
            self.restart_agent()

    def recorded(self) -> Sequence[UnitAllocation] | Unknown:
        if not self.known:
            return Unknown()
        alive = (allocation for pod in self.pods.values() if not pod.forgotten for allocation in pod.allocations)
        return [*self.stale, *alive]

    def running(self, asked: Collection[PodUid]) -> frozenset[PodUid] | Unread:
        if not self.visible:
            return Unread(HostPath("/proc"))
        return frozenset(uid for uid in asked if uid in self.pods and self.pods[uid].running)

    @rule(
        shape=st.sampled_from(SHAPES),
        units=st.lists(st.sampled_from((100, 250, 600, 1000)), min_size=4, max_size=4),
        gpu=st.sampled_from((*GPUS, GpuId("GPU-gone"), None)),
        reported=st.booleans(),
    )
    def admit(self, shape: Sequence[ContainerKind], units: list[int], gpu: GpuId | None, reported: bool) -> None:
        names = [ContainerName(f"c{number}") for number in range(len(shape))]
        demand = Demand(tuple(ContainerDemand(*each) for each in zip(names, shape, map(Units, units), strict=False)))
        uid = PodUid(f"pod-{next(self.numbers)}")
        allocations = []
        for container in demand.containers:
            ids = [unit_id(number) for number in range(container.units)]  # the same in all pods, as if kubelets erred
            request = AllocationRequest(UNITS_RESOURCE, [ids])
            try:
                (answer,) = self.loop.run_until_complete(self.allocator.allocate(request))
            except AllocationRefusedError:
                return
            allocations.append(UnitAllocation(uid, container.name, frozenset(ids), answer.cdi_devices[0]))
        desired = (
            placement(demand, {container.name: {gpu: container.units} for container in demand.containers})
            if gpu
            else None
        )
        self.pods[uid] = Pod(PodOnNode(uid, "default", uid, demand, desired), allocations, reported=reported)
        self.report()

    @rule()
    def report(self) -> None:
        """The API server reports its pods, at any time."""
        self.api.observe({uid: pod.known for uid, pod in self.pods.items() if pod.reported})

    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        if self.pods:
            self.pods[data.draw(st.sampled_from(sorted(self.pods)))].reported = True
            self.report()

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Start a container, or start it again."""
        if self.pods:
            pod = self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
            self.start_container(pod, data.draw(st.sampled_from(pod.allocations)))

    @rule()
    def start_all(self) -> None:
        for pod in self.pods.values():
            for allocation in pod.allocations:
                self.start_container(pod, allocation)

    def start_container(self, pod: Pod, allocation: UnitAllocation) -> None:
        self.shares.refusals.take()
        try:
            self.loop.run_until_complete(self.allocator.pre_start(UNITS_RESOURCE, sorted(allocation.ids)))
        except AllocationRefusedError:
            return
        assert allocation.device is not None
        path = self.folder / "cdi" / f"gpuvirt.io-share-{allocation.device.partition('=')[2]}.json"
        if not path.exists() or any(refusal.pod.uid == pod.known.uid for refusal in self.shares.refusals.take()):
            return  # another container with these ids could start, and this one can't
        variables = dict(text.split("=", 1) for text in spec_env(path))
        by_mps = "CUDA_MPS_PIPE_DIRECTORY" in variables
        assert not (by_mps and self.daemon.away), "a process that finds no daemon has no limit"
        assert pod.by_mps.setdefault(allocation.container, by_mps) == by_mps, "a container keeps its limit"
        seen = variables["GPUVIRT_GPUS"]
        assert seen not in self.claims.changed, "a container starts with a GPU that a change has"
        before = pod.running.get(allocation.container)
        assert before is None or before == seen, "a container keeps its GPU"
        pod.running[allocation.container] = GpuId(seen)

    @rule(data=st.data(), forgotten=st.booleans())
    def end(self, data: st.DataObject, forgotten: bool) -> None:
        if self.pods:
            pod = self.pods.pop(data.draw(st.sampled_from(sorted(self.pods))))
            self.stale = [] if forgotten else [*self.stale, *pod.allocations]

    @rule()
    def lose_running_pods(self) -> None:
        """All running pods are deleted by force, and the kubelet forgets them at once; the agent reads twice."""
        for pod in self.pods.values():
            if pod.running:
                pod.reported, pod.forgotten = False, True
        self.report()
        self.tidy()
        self.tidy()

    @rule(data=st.data(), forgotten=st.booleans())
    def delete_by_force(self, data: st.DataObject, forgotten: bool) -> None:
        """The API server forgets a pod, and the kubelet at once or later; its containers run on."""
        if self.pods:
            pod = self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
            pod.reported, pod.forgotten = False, forgotten
            self.report()

    @rule(gpu=st.sampled_from(GPUS))
    def begin_change(self, gpu: GpuId) -> None:
        """A change begins, unless the agent's records or the kubelet's show that a pod has the GPU or may get it."""
        started = self.shares.records.pods
        recorded = self.recorded()
        if isinstance(recorded, Unknown) or any(allocation.pod not in started for allocation in recorded):
            return
        if not any(gpu in pod.placement.used for pod in started.values()):
            self.claims.changed.add(gpu)

    @rule()
    def end_changes(self) -> None:
        self.claims.changed.clear()

    @rule(enforcement=st.sampled_from((Enforcement.NONE, Enforcement.MPS)))
    def change_limits(self, enforcement: Enforcement) -> None:
        """Shares of new pods are limits from now on, or no more."""
        self.capacity = replace(self.capacity, enforcement=enforcement)
        self.shares.follow(replace(self.shares.state.get(), published=self.capacity, node=self.capacity))

    @rule(away=st.booleans())
    def end_or_begin_the_daemon(self, away: bool) -> None:
        """The containers of all pods start after it, since they end with their daemon."""
        self.daemon.away[:] = ["Cannot find MPS control daemon process"] if away else []
        self.start_all()

    @rule(visible=st.booleans())
    def hide_or_show_processes(self, visible: bool) -> None:
        self.visible = visible

    @rule()
    def tidy(self) -> None:
        self.loop.run_until_complete(self.allocator.tidy())

    @rule(known=st.booleans())
    def lose_or_find_the_kubelets_record(self, known: bool) -> None:
        self.known = known

    @rule(gpus=st.sets(st.sampled_from(GPUS)))
    def change_health(self, gpus: set[GpuId]) -> None:
        self.capacity = replace(self.capacity, capacity={gpu: Units(1000) for gpu in gpus})
        self.shares.follow(replace(self.shares.state.get(), published=self.capacity, node=self.capacity))

    @invariant()
    def no_gpu_runs_more_than_its_units(self) -> None:
        for gpu in GPUS:
            used = (self.used(pod, gpu) for pod in self.pods.values())
            assert sum(used) <= 1000

    @invariant()
    def records_agree_with_what_containers_see(self) -> None:
        for uid, pod in self.pods.items():
            record = self.shares.store.records.get().pods.get(uid)
            assert record is not None or not pod.running
            assert all(list(record.containers[name].gpus) == [gpu] for name, gpu in pod.running.items() if record)

    @invariant()
    def pods_have_one_kind_of_limit(self) -> None:
        for record in self.shares.store.records.get().pods.values():
            parts = [share.limit for share in record.containers.values() if share.units < 1000]
            assert len({limit.by if limit is not None else None for limit in parts}) <= 1

    @invariant()
    def no_change_has_the_gpu_of_a_container(self) -> None:
        for pod in self.pods.values():
            assert not self.claims.changed.intersection(pod.running.values())

    @staticmethod
    def used(pod: Pod, gpu: GpuId) -> int:
        """Return the most units of a GPU that the started containers of a pod run at a time."""
        demand = pod.known.demand
        return most_at_a_time(
            demand,
            {
                container.name: container.units
                for container in demand.containers
                if pod.running.get(container.name) == gpu
            },
        )


Shares.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestShares = pytest.mark.filterwarnings("ignore::ResourceWarning")(Shares.TestCase)


def _by_the_api_server_alone(state: ShareState, reading: PodReading) -> ShareState:
    return replace(state, ended=reading.gone, accounts=reading)


def _without_running(
    gone: frozenset[PodUid], in_kubelet: frozenset[PodUid] | Unknown, running: frozenset[PodUid] | Unread
) -> Mapping[PodUid, KeptShare]:
    del running
    return why_kept(gone, in_kubelet, frozenset())


def _claim_anyway(_: Changes, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
    del gpus, unit
    record()


def _unasked(daemon: MpsNode, gpu: GpuId) -> str:
    del gpu
    return str(daemon.pipes)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (ShareState, "with_accounts", _by_the_api_server_alone),
        (nodeshares, "why_kept", _without_running),
        (Changes, "claim", _claim_anyway),
        (MpsNode, "ensure", _unasked),
    ],
    ids=["the kubelet's account and the processes", "the processes", "the gate", "the daemon's answer"],
)
def test_the_removal_of_a_guard_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, instead: object
) -> None:
    monkeypatch.setattr(owner, name, instead)
    quickly = settings(
        max_examples=2000, stateful_step_count=40, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False
    )
    monkeypatch.setattr(Shares.TestCase, "settings", quickly)
    with pytest.raises((AssertionError, ExceptionGroup)):
        Shares.TestCase().runTest()

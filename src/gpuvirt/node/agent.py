"""The agent of one node: observations come in here, and its conclusions go out as one view.

Front ends (the device plugins, the probes, the client of the API server) call `observe_...` and the `allocator`, and
follow `views`. They don't know each other, and none of them touches the host.
"""

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from gpuvirt.clock import Signal
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.desired.observed import NodeRequest, OperandsObserved, Progress
from gpuvirt.model.offers.ondemand.podends import PodEnds
from gpuvirt.model.offers.schedulable import Count
from gpuvirt.model.offers.view import AgentView, NodeView, Registration
from gpuvirt.model.reasons import Reason
from gpuvirt.node.allocation.allocator import Allocator, Callbacks, Request
from gpuvirt.node.change.allocationgate import AllocationGate
from gpuvirt.node.change.gate.gate import gate_at
from gpuvirt.node.change.gate.membership import Membership
from gpuvirt.node.change.site import Site
from gpuvirt.node.known.kubeletrecord import KubeletRecord
from gpuvirt.node.known.podinquiry import PodInquiry
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.known.tenancykeeper import TenancyKeeper
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.latercall import LaterCall
from gpuvirt.node.loops.telemetry import Telemetry
from gpuvirt.node.loops.watcher import Audience, Watcher
from gpuvirt.node.ondemand.ondemandallocator import OnDemandAllocator, OnDemandParts
from gpuvirt.node.options import NodeOptions
from gpuvirt.node.outlets import Outlets
from gpuvirt.node.published.problemlog import ProblemLog
from gpuvirt.node.reconcile.gatewatch import GateWatch
from gpuvirt.node.reconcile.operands import Operands
from gpuvirt.node.reconcile.podaccount import PodAccount
from gpuvirt.node.reconcile.reports import Reports
from gpuvirt.node.shares.gpuclaims import GatedGpus
from gpuvirt.node.shares.nodeshares import NodeShares
from gpuvirt.node.store import tenancyfile
from gpuvirt.node.store.desiredstatestore import DesiredStateStore
from gpuvirt.node.store.ledgerstore import ledger_store
from gpuvirt.tasks import keep_going


class Agent:
    """One node's agent."""

    def __init__(
        self, options: NodeOptions, kubelet: KubeletRecord, agent: AgentView, shares: NodeShares | None = None
    ) -> None:
        clock, writing = options.clock, options.workers("writing")
        self.shares = shares
        """The shares of GPUs; None for an agent that can't share GPUs."""
        self.telemetry = Telemetry()
        self.allocated = Signal()
        """Set after each allocation and withdrawal: the account watch asks the kubelet for allocations then."""
        self._options = options
        self._kubelet = kubelet
        self._clock = clock
        self._stale = Signal()
        self._store = DesiredStateStore(options.desired_state, options.node_name, writing, clock)
        self._store.load()
        self._ledger_store = ledger_store(options.ledger, writing, clock)
        self._ledger_store.load()
        self._operands = Operands(clock, options.intervals) if options.vgpus_only else None
        self.node_counts: Cell[Mapping[ResourceName, Count]] | None = Cell({}) if options.writes_node_counts else None
        """The counts of devices for the scheduler; None where the agent does not publish them."""
        with_gpus = (shares.with_gpus,) if shares is not None else ()
        self._state = NodeState(
            options.terms(agent, uuid.uuid4().hex[:8]),
            self._ledger_store.value,
            TenancyKeeper(tenancyfile.beside(options.ledger), self._ledger_store.value, *with_gpus),
            (lambda: shares.given) if shares is not None else (lambda: None),
            self._store.good_configs,
        )
        self._soon, self._again = LaterCall(clock, self._stale.set), LaterCall(clock, self._stale.set)
        self._log = ProblemLog()
        self._watcher = Watcher(
            options.kernel,
            options.workers("watching"),
            clock,
            options.intervals,
            telemetry=self.telemetry,
            sees_processes=not options.plugin_only,
        )
        self._account = PodAccount(self._state, kubelet.recorded, *with_gpus)
        self._reports = Reports(self._observe_change, self._stale.set, self.report_problem)
        self.views: Cell[NodeView] = Cell(self._refresh())
        membership = Membership(gate_at(options.gates), may_lack=options.plugin_only)
        self._gates = GateWatch(membership, self._state, self._reports, self._watcher.observe_soon, options.moves)
        refused, unseen = lambda: self._watcher.observe_soon("refusal"), partial(self.report_problem, "users")
        callbacks = Callbacks(self._observe_allocation, refused, unseen)
        allocation_gate = AllocationGate(self._state.changes, lambda: membership.gate)
        self.allocator = Allocator(self._state, options, kubelet, self.telemetry, callbacks, allocation_gate)
        self._changed = Signal()
        """Set when the host or the allocations may have changed, for an allocation that waits for room."""
        self._outlets = Outlets(options, self.views, self.report_problem)
        self.on_demand = self._on_demand(allocation_gate)
        """Allocates vGPUs that are created for a pod; None for an agent that changes no GPUs."""
        self.hurried = self.on_demand.patience.begun if self.on_demand is not None else Signal()
        """Set when an allocation begins to wait for the vGPU of a pod that may have ended."""
        self.gpu_claims = GatedGpus(self._state, allocation_gate, options.kernel)

    def _on_demand(self, gate: AllocationGate) -> OnDemandAllocator | None:
        options = self._options
        if options.moves is None:
            return None
        parts = OnDemandParts(
            self._state,
            options,
            self._kubelet,
            options.moves,
            gate,
            self.telemetry,
            self._ledger_store,
            self._publish,
            lambda: self._watcher.observe_soon("creation"),
            self._changed,
        )
        return OnDemandAllocator(parts)

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the preferred devices; raise PlacementError if the request contradicts itself."""
        if self.on_demand is not None and any(map(is_on_demand_id, available)):
            return self.on_demand.prefer(available, must_include, size)
        return self.allocator.prefer(resource, available, must_include, size)

    async def allocate(self, request: Request) -> tuple[Attachment, ...]:
        """Allocate devices to containers; raise AllocationRefusedError for the whole request."""
        if self.on_demand is not None and self.on_demand.takes(request):
            return await self.on_demand.allocate(request)
        return await self.allocator.allocate(request)

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceId]) -> None:
        """Let a container start with its devices; raise AllocationRefusedError."""
        if self.on_demand is not None:
            await self.on_demand.pre_start(resource, devices)

    def _publish(self) -> None:
        """Show an allocation in all lists and in the CDI specs before the kubelet has its answer."""
        self.conclude()
        self.allocated.set()
        self._outlets.write_specs()

    async def run(self) -> None:
        """Observe, conclude and record, for ever; unwritten files are written at the end."""
        options, clock = self._options, self._clock
        try:
            async with asyncio.TaskGroup() as group:
                report = partial(self.report_problem, "watcher")
                callbacks = Audience(self.observe_facts, report, lambda: self._state.suspicious)
                group.create_task(self._watcher.run(callbacks))
                group.create_task(self._conclude())
                self._outlets.start(group)
                if options.moves is not None:
                    self._change_gpus(group, options.moves)
                group.create_task(keep_going("gates", lambda: self._gates.run(clock, options.intervals.gates_s), clock))
                group.create_task(self._ledger_store.run(partial(self.report_problem, "journal")))
                group.create_task(self._store.run(partial(self.report_problem, "desired state")))
        finally:
            self._gates.leave()
            self._ledger_store.save(self._state.ledger.content)
            await self._ledger_store.flush()
            await self._store.flush()

    def _change_gpus(self, group: asyncio.TaskGroup, moves: Site) -> None:
        """Start the reconciler, which changes each unit in the unit's one serial worker.

        An agent that changes no GPUs does not load it: planning, taking and rolling back steps are 30 modules.
        """
        from gpuvirt.node.reconcile.reconciler import Reconciler  # noqa: PLC0415

        reconciler = Reconciler(
            self._state, self._account, self._reports, moves, self._options, operands=self._operands
        )
        group.create_task(keep_going("changes", lambda: reconciler.run(self.views), self._clock))

    @property
    def vgpu_states(self) -> Cell[Progress | None]:
        """The progress of the desired vGPUs, as reported to the cluster; None: not reported."""
        return self._reports.vgpus

    @property
    def workload_states(self) -> Cell[Progress | None]:
        """The progress of the desired drivers, as reported to the cluster; None: not reported."""
        return self._reports.workload

    @property
    def looked(self) -> bool:
        """Whether the host was observed yet and the view shows it."""
        return self.views.get().looked

    @property
    def desired(self) -> NodeRequest:
        """The desired state from the cluster, as last observed, also before a restart."""
        return self._store.desired

    def take_request(self, request: NodeRequest) -> None:
        """Take the desired state from the cluster; fields that are unknown in `request` stay as they were."""
        if self._store.take_request(request):
            self._stale.set()

    def observe_kind(self, *, exists: bool) -> None:
        """Take whether the cluster has the kind GpuNode; without it no controller can review resource names."""
        if self._state.observe_kind(exists=exists):
            self._stale.set()

    def observe_node_counts(self, counts: Mapping[ResourceName, int]) -> None:
        """Take the counts of resources in the node's status."""
        if self._state.observe_status_counts(counts):
            self._stale.set()

    @property
    def on_demand_pods(self) -> frozenset[PodUid]:
        """The pods that have on-demand vGPUs, by the ledger."""
        return self._state.on_demand_pods

    def observe_pod_ends(self, ends: PodEnds) -> None:
        """Take the pods of the node that have ended or are being deleted, by the API server."""
        if self._state.observe_pod_ends(ends):
            self._stale.set()
            self.allocated.set()  # the kubelet is asked soon which ids it has freed

    def observe_facts(self, facts: Facts, since_s: float = math.inf, /) -> None:
        """Take the facts of an observation of the host, which has begun at `since_s`."""
        if self._gates.observe_facts(facts):
            self._stale.set()
        self._changed.set()
        if self._state.observe_facts(facts, since_s) or self._state.decisions.judged_again_at_s is not None:
            self._stale.set()

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Take the kubelet's account of allocated devices, None if the kubelet did not answer."""
        self._account.observe_account(account)
        self._changed.set()
        waited = not self._state.counted.is_known
        if self._state.observe_account(account) or self._is_growing or (waited and self._state.counted.is_known):
            self._stale.set()
        self._gates.answer_commands()
        awaited = self.hurries or self._state.awaits_end or self._may_count_otherwise
        if awaited or (self.operands_away.get() and self._account.awaits_reading):
            self.allocated.set()  # the kubelet is asked again soon
        if self._operands is not None:
            self._operands.stir()

    @property
    def pod_inquiry(self) -> PodInquiry:
        """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
        return self._kubelet.inquiry

    @property
    def operands_away(self) -> Cell[bool]:
        """Whether the other project's device plugin, which offers the agent's vGPUs, must be stopped."""
        return self._operands.to_be_away if self._operands is not None else Cell(False)

    def observe_operands(self, observed: OperandsObserved | None) -> None:
        """Take the observed state of that device plugin, None if it is unknown whether it has stopped."""
        if self._operands is not None:
            self._operands.observe(observed)
            self.allocated.set()  # the kubelet is asked what it still counts

    @property
    def unsettled(self) -> bool:
        """Whether the kubelet's count may still differ from the offered devices."""
        return not self._state.counted.is_known or self._may_count_otherwise

    @property
    def hurries(self) -> bool:
        """Whether an allocation waits for the vGPU of a pod that may have ended."""
        return self.on_demand is not None and self.on_demand.patience.waits

    @property
    def _may_count_otherwise(self) -> bool:
        return self._is_growing or self._state.counted.is_awaited

    @property
    def _is_growing(self) -> bool:
        return self._state.memory.notice.is_growing(self._clock.monotonic_s())

    def observe_registration(self, resource: ResourceName, registration: Registration) -> None:
        """Take the state of a resource's registration with the kubelet."""
        if self._state.observe_registration(resource, registration):
            if registration.because is not None:
                self._log.add(registration.because)
            self._stale.set()

    def report_problem(self, who: str, problem: Reason | None) -> None:
        """Take the problem of a part of the agent, None when it has none any more."""
        if self._state.note(who, problem):
            if problem is not None:
                self._log.add(problem)
            self._stale.set()

    def _observe_change(self, kinds: tuple[str, ...], outcome: str) -> None:
        """Take that a change of the kinds `passthrough`, `native` or `vgpus` has ended."""
        for kind in kinds:
            self.telemetry.moves[kind, outcome] += 1
        self._watcher.observe_soon("change")
        self._changed.set()
        self._stale.set()  # devices that the change has withheld may be offered again

    def _observe_allocation(self) -> None:
        """Conclude soon, but after the requests that a pod with several containers makes at once."""
        self.allocated.set()
        self._soon.after(self._options.intervals.conclude_s)

    async def _conclude(self) -> None:
        """Draw conclusions after each new observation."""
        with self.shares.notifying(self._stale) if self.shares is not None else nullcontext():
            while True:
                await self._stale.wait()
                self.conclude()

    def conclude(self) -> None:
        """Draw the conclusions from all observations."""
        self.views.set(self._refresh())
        if self.node_counts is not None and self._state.memory.notice.counts != self.node_counts.get():
            self.node_counts.set(self._state.memory.notice.counts)
        if self.shares is not None:
            self.shares.observe_gpus(self._state.memory.sharing.gpus, self._state.memory.sharing.minors)
        if self._operands is not None:
            self._operands.stir()
        if self._state.memory.withdrawal.grew or self._is_growing:
            self.allocated.set()  # the kubelet is asked again for its allocations
        self._gates.answer_commands()
        self._ledger_store.save(self._state.ledger.content)
        self._watcher.observe_again_at(self._state.decisions.judged_again_at_s)
        self._again.at(self._state.decisions.again_at_s)

    def _refresh(self) -> NodeView:
        """Return the view of all observations."""
        self._state.observe_request(self._store.desired)
        view = self._state.refresh(self._clock.monotonic_s(), self._clock.now())
        if (good := self._state.memory.desired.good_configs) is not None:
            self._store.observe_good_configs(good)
        self._log.follow(view.invalid, self._state.memory.review.problem)
        return view

"""The agent of one node: it decides by what was observed, and its decisions go out as one view.

Front ends (the device plugins, the probes, the client of the API server) report to `observations`, have devices
allocated, and follow `views`. They don't know each other, and none of them touches the host.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.offers.schedulable import Count
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.node.allocation.allocator import Allocator, Callbacks, Request
from gpuvirt.node.allocation.startcheck import verify_start
from gpuvirt.node.change.allocationgate import AllocationGate
from gpuvirt.node.change.gate.gate import gate_at
from gpuvirt.node.change.gate.membership import Membership
from gpuvirt.node.change.site import Site
from gpuvirt.node.known.kubeletrecord import KubeletRecord
from gpuvirt.node.known.podinquiry import PodInquiry
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.known.tenancykeeper import TenancyKeeper
from gpuvirt.node.loops.latercall import LaterCall
from gpuvirt.node.loops.telemetry import Telemetry
from gpuvirt.node.loops.wakes import Wakes
from gpuvirt.node.loops.watcher import Audience, Watcher
from gpuvirt.node.observations import Observations
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
        self._options = options
        self._kubelet = kubelet
        self._clock = clock
        self._wakes = wakes = Wakes()
        self._store = DesiredStateStore(options.desired_state, options.node_name, writing, clock)
        self._store.load()
        self._ledger_store = ledger_store(options.ledger, writing, clock)
        self._ledger_store.load()
        self._operands = Operands(clock, options.intervals, wakes.operands) if options.vgpus_only else None
        self.node_counts: Cell[Mapping[ResourceName, Count]] | None = Cell({}) if options.writes_node_counts else None
        """The counts of devices for the scheduler; None where the agent does not publish them."""
        with_gpus = (shares.with_gpus,) if shares is not None else ()
        self._state = NodeState(
            options.terms(agent, uuid.uuid4().hex[:8]),
            self._ledger_store.value,
            TenancyKeeper(tenancyfile.beside(options.ledger), self._ledger_store.value, *with_gpus),
            (lambda: shares.given) if shares is not None else (lambda: None),
            self._store.good_configs,
            self._store.enforcement,
        )
        self._soon, self._again = LaterCall(clock, wakes.decide.set), LaterCall(clock, wakes.decide.set)
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
        self.reports = Reports(self._state, wakes, self._log, self.telemetry, self._watcher.observe_soon)
        """What the agent's parts report: problems, and the progress toward the desired state."""
        self.views: Cell[NodeView] = Cell(self._decided())
        membership = Membership(gate_at(options.gates), may_lack=options.plugin_only)
        self._gates = GateWatch(membership, self._state, self.reports, self._watcher.observe_soon, options.moves)
        refused, unseen = lambda: self._watcher.observe_soon("refusal"), partial(self.reports.problem, "users")
        callbacks = Callbacks(self._observe_allocation, refused, unseen)
        allocation_gate = AllocationGate(self._state.changes, lambda: membership.gate)
        self.allocator = Allocator(self._state, options, kubelet, self.telemetry, callbacks, allocation_gate)
        self._outlets = Outlets(options, self.views, self.reports.problem)
        self.on_demand = self._on_demand(allocation_gate)
        """Allocates vGPUs that are created for a pod; None for an agent that changes no GPUs."""
        self.observations = Observations(
            self._state,
            wakes,
            clock,
            store=self._store,
            account=self._account,
            gates=self._gates,
            operands=self._operands,
            patience=self.on_demand.patience if self.on_demand is not None else None,
            reports=self.reports,
        )
        """What front ends and the watcher observe."""
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
            self._wakes.room,
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
        recorded = self._kubelet.recorded()
        verify_start(self._state, recorded, resource, devices)
        if self.on_demand is not None:
            await self.on_demand.pre_start(resource, devices, recorded)

    def _publish(self) -> None:
        """Show an allocation in all lists and in the CDI specs before the kubelet has its answer."""
        self.decide()
        self._wakes.ask_kubelet.set()
        self._outlets.write_specs()

    async def run(self) -> None:
        """Observe, decide and record, for ever; unwritten files are written at the end."""
        options, clock = self._options, self._clock
        try:
            async with asyncio.TaskGroup() as group:
                report = partial(self.reports.problem, "watcher")
                callbacks = Audience(self.observations.observe_facts, report, lambda: self._state.suspicious)
                group.create_task(self._watcher.run(callbacks))
                group.create_task(self._decide_when_woken())
                self._outlets.start(group)
                if options.moves is not None:
                    self._change_gpus(group, options.moves)
                group.create_task(keep_going("gates", lambda: self._gates.run(clock, options.intervals.gates_s), clock))
                group.create_task(self._ledger_store.run(partial(self.reports.problem, "journal")))
                group.create_task(self._store.run(partial(self.reports.problem, "desired state")))
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

        reconciler = Reconciler(self._state, self._account, self.reports, moves, self._options, operands=self._operands)
        group.create_task(keep_going("changes", lambda: reconciler.run(self.views), self._clock))

    @property
    def host_observed(self) -> bool:
        """Whether the host was observed yet and the view shows it."""
        return self.views.get().host_observed

    @property
    def pod_inquiry(self) -> PodInquiry:
        """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
        return self._kubelet.inquiry

    def _observe_allocation(self) -> None:
        """Decide soon, but after the requests that a pod with several containers makes at once."""
        self._wakes.ask_kubelet.set()
        self._soon.after(self._options.intervals.decide_s)

    async def _decide_when_woken(self) -> None:
        """Decide after each new observation, for ever."""
        with self.shares.notifying(self._wakes.decide) if self.shares is not None else nullcontext():
            while True:
                await self._wakes.decide.wait()
                self.decide()

    def decide(self) -> None:
        """Decide by all observations, and hand out the decisions."""
        self.views.set(self._decided())
        if self.node_counts is not None and self._state.memory.notice.counts != self.node_counts.get():
            self.node_counts.set(self._state.memory.notice.counts)
        if self.shares is not None:
            sharing = self._state.memory.sharing
            self.shares.observe_gpus(sharing.gpus, sharing.minors, sharing.memory_mib)
        self._wakes.operands.set()
        if self._state.memory.withdrawal.grew or self.observations.is_growing:
            self._wakes.ask_kubelet.set()
        self._gates.answer_commands()
        self._ledger_store.save(self._state.ledger.content)
        self._watcher.observe_again_at(self._state.decisions.judged_again_at_s)
        self._again.at(self._state.decisions.again_at_s)

    def _decided(self) -> NodeView:
        """Decide, and return the view of the node."""
        self._state.observe_request(self._store.desired)
        view = self._state.decide(self._clock.monotonic_s(), self._clock.now())
        if (good := self._state.memory.desired.good_configs) is not None:
            self._store.observe_good_configs(good)
        if (enforcement := self._state.memory.desired.enforcement) is not None:
            self._store.observe_enforcement(enforcement)
        self._log.follow(view.invalid, self._state.memory.review.problem)
        return view

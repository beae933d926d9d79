"""The agent of one node: it decides from its observations, and publishes its decisions as one view.

Front ends (the device plugins, the probes, the client of the API server) report to `observations`, have devices
allocated by `allocators`, and follow `views`. They don't know each other, and none of them touches the host.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.agent.allocators import AllocatorParts, Allocators
from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.gate.drainrequest import Membership
from gpuvirt.agent.change.gate.gate import gate_at
from gpuvirt.agent.claims.preparing import ClaimFiles, ClaimParts, Preparing
from gpuvirt.agent.claims.publishing import Publishing
from gpuvirt.agent.known.kubeletrecord import KubeletRecord, PodInquiry
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.known.tenancykeeper import TenancyKeeper
from gpuvirt.agent.known.typenamequestions import TypeNameQuestions
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.loops.wakes import Wakes
from gpuvirt.agent.loops.watcher import Audience, Watcher
from gpuvirt.agent.observations import Observations
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.published import CdiFiles, StateFile
from gpuvirt.agent.reconcile.gatewatch import GateWatch
from gpuvirt.agent.reconcile.operands import Operands
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.agent.reconcile.reports import ProblemLog, Reports
from gpuvirt.agent.shares.gpuclaims import GatedGpus
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.agent.store import hostfiles
from gpuvirt.agent.store.agentstate import AgentFiles
from gpuvirt.facts.ids import ResourceName
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.model.reasons import Reason
from gpuvirt.tasks import keep_going


class Outlets:
    """The files of one agent that follow its views."""

    def __init__(
        self, options: NodeOptions, views: Cell[NodeView], report_problem: Callable[[str, Reason | None], None]
    ) -> None:
        self._options = options
        self._views = views
        self._report_specs = partial(report_problem, "cdi")
        folder = options.device_specs
        self._specs = CdiFiles(folder, options.clock, options.intervals) if folder is not None else None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the tasks that write the files which this agent has."""
        options, views = self._options, self._views
        if options.markers is not None:
            group.create_task(options.markers.run(views))
        if options.state_file is not None:
            group.create_task(StateFile(options.state_file, options.clock, options.intervals).run(views))
        if self._specs is not None:
            group.create_task(self._specs.run(views, self._report_specs))

    def write_specs(self) -> None:
        """Write the CDI specs of the present view now."""
        if self._specs is not None:
            self._report_specs(self._specs.write(self._views.get()))


class Agent:
    """One node's agent."""

    def __init__(
        self, options: NodeOptions, kubelet: KubeletRecord, agent: AgentView, shares: NodeShares | None = None
    ) -> None:
        options = replace(options, workers=cache(options.workers))  # one worker of each unit for all that use its GPUs
        self.shares = shares
        """The shares of GPUs; None for an agent that can't share GPUs."""
        self.telemetry = Telemetry()
        self.node_counts: Cell[Mapping[ResourceName, Count]] | None = (
            Cell({}) if options.terms.notice is not None else None
        )
        """The counts of devices for the scheduler; None where the agent does not publish them."""
        self._options = options
        self._kubelet = kubelet
        self._clock = options.clock
        self._wakes = Wakes(options.clock, options.intervals.decide_s)
        self._log = ProblemLog()
        self._files = AgentFiles(
            options.ledger, options.desired_state, options.node_name, options.workers("writing"), options.clock
        )
        self._state = self._known(agent)
        self._watcher = self._watching()
        self.reports = Reports(self._state, self._wakes, self._log, self.telemetry, self._watcher.observe_soon)
        """The reports of the agent's parts: problems, and the progress toward the desired state."""
        self.views: Cell[NodeView] = Cell(self._decided())
        self._outlets = Outlets(options, self.views, self.reports.problem)
        membership = Membership(gate_at(options.gates), may_lack=options.plugin_only)
        self._gates = GateWatch(membership, self._state, self.reports, self._watcher.observe_soon, options.change_host)
        gate = AllocationGate(self._state.changes, lambda: membership.gate)
        self.gpu_claims = GatedGpus(self._state, gate, options.kernel)
        self.allocators = Allocators(self._allocating(gate))
        """The allocators, which answer the kubelet's requests."""
        self._operands = (
            Operands(options.clock, options.intervals, self._wakes.operands) if options.terms.vgpus_only else None
        )
        self._account = PodAccount(self._state, kubelet.recorded, self._with_gpus)
        claims = self._claim_parts()
        self.preparing = Preparing(claims, ClaimFiles(*self._claim_folders)) if claims is not None else None
        """Prepares claims; None for an agent that changes no GPUs."""
        self.publishing = Publishing(claims, self._account) if claims is not None else None
        """The GPUs for claims; None for an agent that changes no GPUs."""
        self.observations = self._observing()
        """The observations of the front ends and the watcher."""

    def _known(self, agent: AgentView) -> NodeState:
        ledger, desired = self._files.ledger.value, self._files.desired
        return NodeState(
            replace(self._options.terms, agent=agent, run_id=uuid.uuid4().hex[:8]),
            ledger,
            TenancyKeeper(hostfiles.tenancies_beside(self._options.ledger), ledger, self._with_gpus),
            lambda: self.shares.picture if self.shares is not None else None,
            desired.good_configs,
            desired.enforcement,
        )

    def _with_gpus(self, consumers: Consumers) -> Consumers:
        return self.shares.with_gpus(consumers) if self.shares is not None else consumers

    def _watching(self) -> Watcher:
        options = self._options
        return Watcher(
            options.kernel,
            options.workers("watching"),
            options.clock,
            options.intervals,
            telemetry=self.telemetry,
            sees_processes=not options.plugin_only,
        )

    def _allocating(self, gate: AllocationGate) -> AllocatorParts:
        return AllocatorParts(
            self._state,
            self._options,
            self._kubelet,
            gate,
            self._files.ledger,
            self.telemetry,
            self._watcher,
            self._wakes,
            self.reports,
            self._publish,
        )

    def _claim_parts(self) -> ClaimParts | None:
        options = self._options
        if options.change_host is None or options.terms.vgpus_only:
            return None
        existing, publish = self.allocators.existing, self._publish
        return ClaimParts(self._state, options, options.change_host, existing, self._files.ledger, self.views, publish)

    @property
    def _claim_folders(self) -> tuple[Path, Path]:
        """The folders of CDI specs, and of what containers with claims get; both have the same paths on the host."""
        options = self._options
        specs = options.cdi_folder or options.ledger.parent
        return specs, (options.state_file.parent if options.state_file is not None else specs) / "claims"

    def _observing(self) -> Observations:
        on_demand = self.allocators.on_demand
        return Observations(
            self._state,
            self._wakes,
            self._clock,
            store=self._files.desired,
            account=self._account,
            gates=self._gates,
            operands=self._operands,
            removal_wait=on_demand.removal_wait if on_demand is not None else None,
            reports=self.reports,
        )

    def _publish(self) -> None:
        """Show an allocation in all lists and in the CDI specs before the kubelet has its answer."""
        self.decide()
        self._wakes.ask_kubelet.set()
        self._outlets.write_specs()

    async def run(self) -> None:
        """Observe, decide and record, until cancelled; unwritten files are written at the end."""
        options, clock = self._options, self._clock
        try:
            async with asyncio.TaskGroup() as group:
                report = partial(self.reports.problem, "watcher")
                callbacks = Audience(self.observations.observe_facts, report, lambda: self._state.suspicious)
                group.create_task(self._watcher.run(callbacks))
                group.create_task(self._decide_when_woken())
                self._outlets.start(group)
                if options.change_host is not None:
                    self._change_gpus(group, options.change_host)
                if options.tools is not None:
                    self._ask_for_names(group, options.tools)
                group.create_task(keep_going("gates", lambda: self._gates.run(clock, options.intervals.gates_s), clock))
                group.create_task(self._files.run(self.reports.problem))
        finally:
            self._gates.leave()
            self._files.ledger.save(self._state.ledger.content)
            await self._files.flush()

    def _change_gpus(self, group: asyncio.TaskGroup, change_host: ChangeHost) -> None:
        """Start the reconciler, which changes each unit in the unit's one serial worker.

        An agent that changes no GPUs does not load it: planning, taking and rolling back steps are 30 modules.
        """
        from gpuvirt.agent.reconcile.reconciler import Reconciler  # noqa: PLC0415

        reconciler = Reconciler(
            self._state, self._account, self.reports, change_host, self._options, operands=self._operands
        )
        group.create_task(keep_going("changes", lambda: reconciler.run(self.views), self._clock))

    def _ask_for_names(self, group: asyncio.TaskGroup, tools: Tools) -> None:
        """Start the questions for names of vGPU types, which the unit's one serial worker asks between its changes."""
        options, reports = self._options, self.reports
        questions = TypeNameQuestions(tools, options.workers, self._clock, options.intervals)
        run = partial(questions.run, self._state, self.views, reports.decide_soon)
        group.create_task(keep_going("vGPU type names", run, self._clock))

    @property
    def host_observed(self) -> bool:
        """Whether the host was observed yet and the view shows it."""
        return self.views.get().host_observed

    @property
    def run_id(self) -> str:
        """The random number of this agent's process."""
        return self._state.terms.run_id

    @property
    def pod_inquiry(self) -> PodInquiry:
        """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
        return self._kubelet.inquiry

    async def _decide_when_woken(self) -> None:
        """Decide after each new observation, until cancelled."""
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
            self.shares.follow(self._state.memory.shares)
        self._wakes.operands.set()
        if self._state.memory.withdrawal.grew or self.observations.awaits_new_devices:
            self._wakes.ask_kubelet.set()
        self._gates.answer_commands()
        self._files.keep(self._state.memory.desired, self._state.ledger.content)
        self._watcher.observe_again_at(self._state.decisions.judged_again_at_s)
        self._wakes.decide_again.at(self._state.decisions.again_at_s)

    def _decided(self) -> NodeView:
        """Decide, and return the view of the node."""
        self._state.observe_request(self._files.desired.desired)
        view = self._state.decide(self._clock.monotonic_s(), self._clock.now())
        self._log.follow(view.invalid, self._state.memory.review.problem)
        return view

"""The agent of one node, put together: what it hears comes in here, what it concludes goes out as one view.

Front ends (the kubelet's plugins, probes, the cluster's side) call `hear_...` and the `allocator`, and follow `views`.
They don't know each other, and none of them touches the host.
"""

import asyncio
import logging
from collections.abc import Collection
from functools import cache, partial

from gpuvirt.clock import Signal, Timer, until_tick_s
from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.change.scope import Scope
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.observed import NodeRequest, OperandsObserved, Progress
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.view import AgentView, NodeView, Registration
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.allocation.allocator import Allocator, Callbacks
from gpuvirt.node.change.gate.gate import gate_at
from gpuvirt.node.known.namereview import NameReview
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.known.wants import Wants
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.node.loops.telemetry import Telemetry
from gpuvirt.node.loops.watcher import Audience, Watcher
from gpuvirt.node.published.cdifiles import CdiFiles
from gpuvirt.node.published.notice import Notice
from gpuvirt.node.published.statefile import StateFile
from gpuvirt.node.reconcile import dependencies
from gpuvirt.node.reconcile.dependencies import Dependencies
from gpuvirt.node.reconcile.desiredunits import DesiredUnits
from gpuvirt.node.reconcile.gatewatch import GateWatch
from gpuvirt.node.reconcile.operands import Operands
from gpuvirt.node.reconcile.podaccount import PodAccount
from gpuvirt.node.reconcile.reconciler import Reconciler
from gpuvirt.node.site import Moving, Site
from gpuvirt.node.store import originaldrivers
from gpuvirt.node.store.desiredstatestore import DesiredStateStore
from gpuvirt.node.store.journal import journal_at
from gpuvirt.tasks import keep_going

log = logging.getLogger(__name__)


class Agent:
    """One node's agent."""

    def __init__(self, site: Site, settings: Settings, ids: PciIds, agent: AgentView, intervals: Intervals) -> None:
        self.telemetry = Telemetry()
        self.allocated = Signal()
        """Set after each allocation and withdrawal, for whoever asks the kubelet for holders."""
        self._site = site
        self._intervals = intervals
        self._stale = Signal()
        self._store = DesiredStateStore(site.desired_by_gpu, site.node_name, site.writing, site.clock)
        self._store.load()
        self._journal = journal_at(site.ledger, site.writing, site.clock)
        self._journal.load()
        self._operands = Operands(site.clock, intervals) if site.vgpus_only else None
        self.notice = Notice(site.clock, intervals, self._stale.set) if site.tells_scheduler else None
        """What the scheduler is to count; None where nobody tells it."""
        self._review = NameReview(
            site.clock, intervals.review_most_s, self._stale.set, self._note, expected=site.awaits_controller
        )
        self._state = NodeState(
            settings,
            ids,
            self._journal.value,
            agent,
            notice=self.notice,
            vgpus_only=site.vgpus_only,
        )
        self._state.review_names(self._review)
        self._concluding: Timer | None = None
        self._watcher = Watcher(
            site.kernel,
            site.watching,
            site.clock,
            intervals,
            telemetry=self.telemetry,
            sees_processes=site.sees_processes,
        )
        account = PodAccount(self._state, site.recorded, site.clock)
        self._changes = Dependencies(
            self._state,
            account,
            DesiredUnits(self._state, account.newest),
            self._operands,
            dependencies.Callbacks(self._hear_changed, self._stale.set, self.report_problem),
        )
        in_cluster = site.node_name is not None
        self._wants = Wants(
            self._state, self._store, site.vgpu_configs, in_cluster=in_cluster, hears_spec=site.hears_spec
        )
        self._invalid: tuple[InvalidDesired, ...] = ()
        """What is invalid of the desired state, as the log has it."""
        self.views: Cell[NodeView] = Cell(self._refresh())
        gates = site.moving.site.locks if site.moving is not None else site.gates
        gate = gate_at(gates) if gates is not None else None
        self._gates = GateWatch(gate)
        self._gates.look()
        self._facts: Facts | None = None
        callbacks = Callbacks(self._hear_allocation, lambda: self._watcher.look_soon("refusal"))
        self.allocator = Allocator(self._state, site, self.telemetry, callbacks, gate)

    async def run(self) -> None:
        """Look, conclude, remember, for ever; what was not yet remembered is at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                tell = partial(self.report_problem, "watcher")
                audience = Audience(self.observe_facts, tell, lambda: self._state.suspicious)
                group.create_task(self._watcher.run(audience))
                group.create_task(self._conclude())
                if self._site.markers is not None:
                    group.create_task(self._site.markers.run(self.views))
                if self._site.moving is not None:
                    self._change_gpus(group, self._site.moving)
                group.create_task(keep_going("gates", self._watch_gates, self._site.clock))
                group.create_task(self._journal.run(lambda problem: self.report_problem("journal", problem)))
                group.create_task(self._store.run(lambda problem: self.report_problem("inlets", problem)))
                if self._site.state_file is not None:
                    state_file = StateFile(self._site.state_file, self._site.clock, self._intervals)
                    group.create_task(state_file.run(self.views))
                if self._site.cdi_folder is not None:
                    cdi_files = CdiFiles(self._site.cdi_folder, self._site.clock, self._intervals)
                    group.create_task(cdi_files.run(self.views, lambda problem: self.report_problem("cdi", problem)))
        finally:
            self._gates.stop_draining()
            self._journal.save(self._state.ledger.content)
            await self._journal.flush()
            await self._store.flush()

    def _change_gpus(self, group: asyncio.TaskGroup, moving: Moving) -> None:
        """Start the reconciler, which writes in the one lane of each unit."""
        site, clock = moving.site, self._site.clock
        reconciler = Reconciler(site, cache(moving.workers), clock, self._intervals)
        group.create_task(keep_going("changes", lambda: reconciler.run(self._changes), clock))

    @property
    def vgpu_states(self) -> Cell[Progress | None]:
        """How far what the cluster wants of vGPUs has come, for it to be told; None: it is told nothing."""
        return self._changes.vgpu_states

    @property
    def workload_states(self) -> Cell[Progress | None]:
        """How far it has come that GPUs are as the node's label says, for it to be told; None: it is told nothing."""
        return self._changes.workload_states

    @property
    def looked(self) -> bool:
        """Whether the host was looked at yet, and the view shows it."""
        return self.views.get().looked

    @property
    def desired(self) -> NodeRequest:
        """What the cluster wants of this node's vGPUs, as it was last heard, before a restart too."""
        return self._store.desired

    def take_request(self, request: NodeRequest) -> None:
        """Take what the cluster wants of vGPUs; what `news` has not heard stays as it was."""
        if self._store.take_request(request):
            self._stale.set()

    def observe_kind(self, *, there: bool) -> None:
        """Take whether the cluster has the kind GpuNode; without it no controller can review names of resources."""
        self._review.observe_kind(there=there)

    def observe_facts(self, facts: Facts, /) -> None:
        """Take what a look at the host has shown."""
        self._facts = facts
        if self._gates.unsettled:
            self._gates.settle(self._recorded_changes(facts))
        self._gates.look()
        if self._observe_gates(facts):
            self._stale.set()
        if self._state.observe_facts(facts) or self._state.offers.verdict.again_in_s is not None:
            self._stale.set()

    def _recorded_changes(self, facts: Facts) -> Collection[PciAddress]:
        """Return the functions whose drivers a killed change was changing, which the reconciler ends."""
        if self._site.moving is None:
            return ()
        return originaldrivers.read(self._site.moving.site.original_drivers).of_boot(facts.platform.boot_id).changes

    def _observe_gates(self, facts: Facts) -> bool:
        """Take what other processes change, and where the kernel blocks a step; return whether that is news."""
        drained = Scope(self._gates.functions_of(self._gates.elsewhere, facts))
        before, blocked = self._state.blocked, self._gates.blocked(facts)
        is_change = self._state.hear_gates(drained, blocked)
        if blocked == before:
            return is_change
        for one in {*blocked, *before} & {*facts.functions}:
            if facts.functions[one].kind is FunctionKind.GPU and facts.functions[one].physfn is None:
                self._note(f"gate {one}", refusals.blocked(one, blocked[one]) if one in blocked else None)
        return True

    async def _watch_gates(self) -> None:
        """Look at the gates for ever; what a killed change has left is settled by a look at the host."""
        while self._gates.are_there:
            now_s = self._site.clock.monotonic_s()
            await self._site.clock.sleep(until_tick_s(now_s, self._intervals.gates_s))
            if self._gates.look(whole=False):
                if self._gates.unsettled:
                    self._watcher.look_soon("gate")
                if self._facts is not None and self._observe_gates(self._facts):
                    self._stale.set()
            self._answer_commands()

    def _answer_commands(self) -> None:
        """Tell commands that wait for devices that these are drained, or why they are not going to be."""
        for slot, record in self._gates.requests().items():
            functions = self._gates.functions_of({slot}, self._facts)
            refusal = self._changes.desired.why_kept(record.desires)
            if refusal is not None or self._state.is_drained(functions):
                self._gates.answer(slot, record.generation, refusal)

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Take which pods have which devices, None for not having heard it."""
        self._changes.account.hear_reading(account)
        waited, growing = not self._state.observed_since, self.notice is not None and self.notice.is_growing
        if self._state.observe_account(account) or growing or (waited and self._state.observed_since):
            self._stale.set()
        self._answer_commands()
        if self._may_count_otherwise or (self.operands_away.get() and self._changes.account.awaits_reading):
            self.allocated.set()  # the kubelet is asked again soon
        if self._operands is not None:
            self._operands.stir()

    @property
    def operands_away(self) -> Cell[bool]:
        """Whether another's programs that offer what is here are to be away."""
        return self._operands.to_be_away if self._operands is not None else Cell(False)

    def observe_operands(self, observed: OperandsObserved | None) -> None:
        """Take what is known of these programs, None where that is not enough to tell whether they are away."""
        if self._operands is not None:
            self._operands.observe(observed)
            self.allocated.set()  # the kubelet is asked what it still counts

    @property
    def unsettled(self) -> bool:
        """Whether the kubelet was not yet heard to count what is offered now, and no more than that."""
        return not self._state.observed_since or self._may_count_otherwise

    @property
    def _may_count_otherwise(self) -> bool:
        growing = self.notice is not None and self.notice.is_growing
        return growing or bool(self._state.still_counted or self._state.leaving or self._state.undrained)

    def observe_registration(self, resource: ResourceName, registration: Registration) -> None:
        """Take where the kubelet stands with a resource."""
        if self._state.observe_registration(resource, registration):
            if registration.because is not None:
                log.warning("%s", registration.because.text, extra={"reason": str(registration.because.code)})
            self._stale.set()

    def report_problem(self, who: str, problem: Reason | None) -> None:
        """Take what is wrong with a part of the agent, None when nothing is any more."""
        if self._note(who, problem):
            self._stale.set()

    def _note(self, who: str, problem: Reason | None) -> bool:
        request = self._state.note(who, problem)
        if request and problem is not None and problem not in {one.reason for one in self._invalid}:
            log.warning("%s", problem.text, extra={"reason": str(problem.code)})
        return request

    def _hear_changed(self, what: tuple[str, ...], outcome: str) -> None:
        """Take that a change has ended: of `passthrough` or `native` drivers, of `vgpus`."""
        for kind in what:
            self.telemetry.moves[kind, outcome] += 1
        self._watcher.look_soon("change")
        self._stale.set()  # what the change kept from being offered

    def _hear_allocation(self) -> None:
        """Conclude soon, but not in the way of the requests that a pod of several containers brings at once."""
        self.allocated.set()
        if self._concluding is not None:
            self._concluding.cancel()
        self._concluding = self._site.clock.call_later(self._intervals.conclude_s, self._stale.set)

    async def _conclude(self) -> None:
        """Draw conclusions whenever something new was heard."""
        while True:
            await self._stale.wait()
            self._concluding = None
            self.conclude()

    def conclude(self) -> None:
        """Draw the conclusions from all that was heard."""
        self.views.set(self._refresh())
        self._changes.desired.conclude()
        self._changes.concluded.set()
        if self._operands is not None:
            self._operands.stir()
        if self._state.withdrawal.grew or (self.notice is not None and self.notice.is_growing):
            self.allocated.set()  # the kubelet is asked again who has what
        self._answer_commands()
        self._journal.save(self._state.ledger.content)
        self._watcher.look_again_in(self._state.offers.verdict.again_in_s)

    def _refresh(self) -> NodeView:
        """Return the picture of all that was heard; what has become invalid of the desired state is logged once."""
        self._wants.conclude()
        view = self._state.refresh(self._site.clock.monotonic_s(), self._site.clock.now())
        for one in view.invalid:
            if one not in self._invalid:
                extra = {"reason": str(one.reason.code), "origin": str(one.origin)}
                log.warning("desired state: %s", one.reason.text, extra=extra)
        for one in self._invalid:
            if one not in view.invalid:
                log.info("desired state: no longer invalid: %s %s", one.where, one.reason.message)
        self._invalid = view.invalid
        return view

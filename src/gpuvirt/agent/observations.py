"""The observations of the front ends and the watcher: they go into the agent's state, and wake the agent's loops.

The device plugins, the account watch and the client of the API server call this. They don't know each other, and none
of them touches the host.
"""

import math
from collections.abc import Mapping

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.wakes import Wakes
from gpuvirt.agent.ondemand.ondemandallocator import RemovalWait
from gpuvirt.agent.reconcile.gatewatch import GateWatch
from gpuvirt.agent.reconcile.operands import Operands
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.agent.reconcile.reports import Reports
from gpuvirt.agent.store.agentstate import DesiredStateStore
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.desired.observed import NodeRequest, OperandsObserved
from gpuvirt.model.offers.ondemand.offer import PodEnds


class Observations:
    """Takes the observations of one agent's node."""

    def __init__(  # noqa: PLR0913  what observations go to
        self,
        state: NodeState,
        wakes: Wakes,
        clock: Clock,
        *,
        store: DesiredStateStore,
        account: PodAccount,
        gates: GateWatch,
        operands: Operands | None,
        removal_wait: RemovalWait | None,
        reports: Reports,
    ) -> None:
        """`operands` is another project's device plugin that offers the agent's vGPUs."""
        self.report_problem = reports.problem
        """Takes the problem of a front end, None when it has none any more."""
        self.observe_registration = reports.registration
        """Takes the state of a resource's registration with the kubelet."""
        self._state = state
        self._wakes = wakes
        self._clock = clock
        self._store = store
        self._account = account
        self._gates = gates
        self._operands = operands
        self._removal_wait = removal_wait

    @property
    def desired(self) -> NodeRequest:
        """The desired state from the cluster, as last observed, also before a restart."""
        return self._store.desired

    def take_request(self, request: NodeRequest) -> None:
        """Record the desired state from the cluster; fields that are unknown in `request` stay as they were."""
        if self._store.take_request(request):
            self._wakes.decide.set()

    def observe_kind(self, *, exists: bool) -> None:
        """Record whether the cluster has the kind GpuNode; without it no controller can review resource names."""
        if self._state.observe_kind(exists=exists):
            self._wakes.decide.set()

    def observe_node_counts(self, counts: Mapping[ResourceName, int]) -> None:
        """Record the counts of resources in the node's status."""
        if self._state.observe_status_counts(counts):
            self._wakes.decide.set()

    @property
    def on_demand_pods(self) -> frozenset[PodUid]:
        """The pods that have on-demand vGPUs, by the ledger."""
        return self._state.on_demand_pods

    def observe_pod_ends(self, ends: PodEnds) -> None:
        """Record the pods of the node that have ended or are being deleted, by the API server."""
        if self._state.observe_pod_ends(ends):
            self._wakes.decide.set()
            self._wakes.ask_kubelet.set()  # which ids it has freed

    @property
    def operands_away(self) -> Cell[bool]:
        """Whether the other project's device plugin, which offers the agent's vGPUs, must be stopped."""
        return self._operands.to_be_away if self._operands is not None else Cell(False)

    def observe_operands(self, observed: OperandsObserved | None) -> None:
        """Record the observed state of that device plugin, None if it is unknown whether it has stopped."""
        if self._operands is not None:
            self._operands.observe(observed)
            self._wakes.ask_kubelet.set()  # what it still counts

    def observe_facts(self, facts: Facts, since_s: float = math.inf, /) -> None:
        """Record the facts of an observation of the host, which has begun at `since_s`."""
        if self._gates.observe_facts(facts):
            self._wakes.decide.set()
        self._wakes.room.set()
        if self._state.observe_facts(facts, since_s) or self._state.decisions.judged_again_at_s is not None:
            self._wakes.decide.set()

    @property
    def ask_kubelet(self) -> Signal:
        """Set after each allocation and withdrawal: the kubelet is asked for its allocations then."""
        return self._wakes.ask_kubelet

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Record the kubelet's account of allocated devices, None if the kubelet did not answer."""
        self._account.observe_account(account)
        self._wakes.room.set()
        waited = not self._state.counted.is_known
        if self._state.observe_account(account) or self.awaits_new_devices or (waited and self._state.counted.is_known):
            self._wakes.decide.set()
        self._gates.answer_commands()
        awaited = self.hurries or self._state.awaits_end or self._may_count_otherwise
        if awaited or (self.operands_away.get() and self._account.awaits_reading):
            self._wakes.ask_kubelet.set()  # again, soon
        self._wakes.operands.set()

    @property
    def unsettled(self) -> bool:
        """Whether the kubelet's count may still differ from the offered devices."""
        return not self._state.counted.is_known or self._may_count_otherwise

    @property
    def awaits_record(self) -> bool:
        """Whether the kubelet has not named the pod of an allocation yet, which its record may show once written."""
        return self._state.awaits_record or self._gates.awaits_record or self._account.awaits_record

    @property
    def hurried(self) -> Signal:
        """Set when an allocation begins to wait for the vGPU of a pod that may have ended."""
        return self._removal_wait.begun if self._removal_wait is not None else Signal()

    @property
    def hurries(self) -> bool:
        """Whether an allocation waits for the vGPU of a pod that may have ended."""
        return self._removal_wait is not None and self._removal_wait.waits

    @property
    def _may_count_otherwise(self) -> bool:
        return self.awaits_new_devices or self._state.counted.is_awaited

    @property
    def awaits_new_devices(self) -> bool:
        """Whether the kubelet may soon count more devices of a resource."""
        return self._state.memory.notice.awaits_new_devices(self._clock.monotonic_s())

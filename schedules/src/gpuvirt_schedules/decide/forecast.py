"""The forecast of a transition: the rounds of `transition.advance` on a model in which each step succeeds.

`gpuvirt schedule plan` and `switch` print its steps. Time stands still in it, so that nothing is late, and an eviction
succeeds at once, whatever the budgets say: those are shown beside it.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Ability,
    Action,
    Power,
    Refused,
    VmKey,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt.model.workers.observed import LastCall, ScheduleObservation, VmStep, WorkerNode
from gpuvirt.model.workers.spec import Leave, PhaseName, Schedule, VmPolicy
from gpuvirt.model.workers.status import RESTING, ScheduleStatus, WorkerStep
from gpuvirt_schedules.decide.nextstep import CallVm, DeletePod, EvictPod, MarkNode, ScheduleAction
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import advance
from gpuvirt_schedules.decide.workers import CORDON_SETTLES_S, pods_left

MOST_ROUNDS = 100
"""A worker takes some ten rounds, and all workers of a phase go on in the same ones."""
POWER_AFTER: Mapping[Action, Power] = {
    Action.SUSPEND: Power.SUSPENDED,
    Action.SHUT_DOWN: Power.OFF,
    Action.POWER_OFF: Power.OFF,
    Action.START: Power.ON,
}


NOT_CHECKED: Mapping[VmKey, Abilities] = {}


class PlannedAction(StrEnum):
    """The action of a planned step."""

    CORDON = "cordon"
    EVICT = "evict"
    DELETE = "delete"
    DETACH = "detach"
    """Wait until the volumes of the node are detached."""
    SUSPEND = "suspend"
    SHUT_DOWN = "shut-down"
    POWER_OFF = "power-off"
    START = "start"
    SET_VGPU_TYPE = "set-vgpu-type"
    SET_VGPU_CONFIG = "set-vgpu-config"
    """Set the vGPU config of a node, whose agent applies it once no VM uses a vGPU that has to go."""
    STOP_VMS = "stop-vms"
    """Shut down the VMs of a node that use vGPUs which have to go, if each user of their GPU may be stopped."""
    UNCORDON = "uncordon"
    LABEL = "label"
    """Set or remove the labels of profiles."""
    TAINT = "taint"
    """Set or remove the taint of the announcement."""


MARKS: Mapping[bool | None, PlannedAction] = {
    True: PlannedAction.CORDON,
    False: PlannedAction.UNCORDON,
    None: PlannedAction.TAINT,
}
"""The planned action of a change of a node's marks, by the change's `cordon`."""


class ForecastBudget(msgspec.Struct, frozen=True):
    """A PodDisruptionBudget that covers a pod."""

    name: str
    """Namespace and name: `default/web`."""
    allowed: int
    """The evictions that it allows now."""


class PlannedStep(msgspec.Struct, frozen=True):
    """One step of a transition."""

    node: NodeName
    action: PlannedAction
    target: str
    """The pod (`default/train-0`), the VM, with its new vGPU type, volumes, labels, the vGPU config, or the node."""
    budgets: tuple[ForecastBudget, ...] | None = ()
    """The budgets that cover the pod; None where they could not be read."""


class WaitingWorker(msgspec.Struct, frozen=True):
    """A worker that the steps do not bring to the end of the transition."""

    node: NodeName
    step: WorkerStep
    reason: Reason


class Forecast(msgspec.Struct, frozen=True):
    """The steps of a transition, from what is observed now."""

    phase: PhaseName
    at: datetime
    steps: tuple[PlannedStep, ...]
    waiting: tuple[WaitingWorker, ...]
    """The workers that wait for something that no step changes; the transition is held then."""


class _Model(msgspec.Struct):
    """The observed objects, as steps change them."""

    observed: ScheduleObservation
    schedule: Schedule
    abilities: Mapping[VmKey, Abilities] = msgspec.field(default_factory=dict)
    rounds: int = 0
    started: set[NodeName] = msgspec.field(default_factory=set)
    steps: list[PlannedStep] = msgspec.field(default_factory=list)

    def take(self, action: ScheduleAction, budgets: Mapping[PodUid, tuple[ForecastBudget, ...]] | None) -> None:
        """Take an action, which succeeds."""
        match action:
            case MarkNode():
                self._mark(action)
            case EvictPod(pod=pod) | DeletePod(pod=pod):
                kind = PlannedAction.EVICT if isinstance(action, EvictPod) else PlannedAction.DELETE
                covering = None if budgets is None else budgets.get(pod.uid, ())
                self.steps.append(PlannedStep(action.node, kind, pod.where, covering))
                left = tuple(other for other in self.observed.pods.get(action.node, ()) if other.uid != pod.uid)
                self.observed = replace(self.observed, pods={**self.observed.pods, action.node: left})
            case CallVm():
                self._call(action)

    def pass_round(self) -> None:
        """Detach the volumes of nodes without pods, and let the kubelets of VMs that are on renew their Leases."""
        self.rounds += 1
        nodes, attachments = dict(self.observed.nodes), dict(self.observed.attachments)
        for name, node in nodes.items():
            is_new = name in self.started
            if is_new or (node.is_ready and node.renewal is not None):
                nodes[name] = replace(node, is_ready=True, renewal=f"forecast {self.rounds}")
            volumes = attachments.get(name, ())
            if volumes and node.is_unschedulable and not pods_left(self.observed.pods.get(name, ())):
                self.steps.append(PlannedStep(name, PlannedAction.DETACH, ", ".join(volumes)))
                attachments[name] = ()
        self.observed = replace(self.observed, nodes=nodes, attachments=attachments)

    def _mark(self, action: MarkNode) -> None:
        node = self.observed.nodes[action.node]
        if action.cordon is not None:
            by, settled_s = (self.schedule.name, CORDON_SETTLES_S) if action.cordon else ("", 0.0)
            node = replace(node, is_unschedulable=action.cordon, cordoned_by=by, cordoned_for_s=settled_s)
        if action.taint is not None:
            node = replace(node, is_announced=action.taint)
        if action.labels:
            labels = {**node.labels, **dict(action.labels)}
            node = replace(node, labels={key: value for key, value in labels.items() if value is not None})
            text = ", ".join(f"{key}={value}" if value is not None else f"{key}-" for key, value in action.labels)
            self.steps.append(PlannedStep(action.node, PlannedAction.LABEL, text))
        self._put(node)
        if action.cordon is not None or not action.labels:
            self.steps.append(PlannedStep(action.node, MARKS[action.cordon], action.node))

    def _put(self, node: WorkerNode) -> None:
        self.observed = replace(self.observed, nodes={**self.observed.nodes, node.name: node})

    def _call(self, action: CallVm) -> None:
        vms, call = self.observed.vms, action.call
        if isinstance(vms, VmsUnknown):
            return
        vm = vms[call.vm]
        found = self.abilities.get(call.vm)
        by_action = {
            Action.SUSPEND: found.suspend if found is not None else None,
            Action.SHUT_DOWN: found.shut_down if found is not None else None,
            Action.START: found.start if found is not None else None,
            Action.SET_VGPU_TYPE: found.set_vgpu_type if found is not None else None,
        }
        ability = by_action.get(call.action)
        if ability is not None and ability.is_possible is False:  # unknown: the call is made, and may be refused
            calls = {**self.observed.calls, call.vm: LastCall(call.action, Refused(ability.code, ability.text), 0.0)}
            self.observed = replace(self.observed, calls=calls)
            return
        target = f"{vm.name} {call.vgpu_type}" if call.vgpu_type else vm.name
        self.steps.append(PlannedStep(action.node, PlannedAction(call.action.value), target))
        power = POWER_AFTER.get(call.action, vm.power)
        types = (call.vgpu_type,) if call.vgpu_type else vm.vgpu_types
        self.observed = replace(self.observed, vms={**vms, call.vm: replace(vm, power=power, vgpu_types=types)})
        node = self.observed.nodes.get(action.node)
        if power is Power.ON:
            self.started.add(action.node)
        elif node is not None:
            self.started.discard(action.node)
            self._put(replace(node, is_ready=False))


def forecast(
    schedule: Schedule,
    status: ScheduleStatus,
    observed: ScheduleObservation,
    budgets: Mapping[PodUid, tuple[ForecastBudget, ...]] | None,
    at: datetime,
    abilities: Mapping[VmKey, Abilities] = NOT_CHECKED,
) -> Forecast:
    """Return the steps to the phase that holds at a moment, of a schedule without faults.

    `budgets` has those that cover each pod; None where they could not be read. `abilities` has what can be done with
    VMs: a call that is certain to be refused is no step, and its worker waits.
    """
    timeline = timeline_of(schedule)
    current = timeline.current(at)
    keys, unproven = observed.vms if not isinstance(observed.vms, VmsUnknown) else (), Ability(None)
    # The abilities of a VM that was not asked about are not proven, and keep nothing.
    known = {key: abilities.get(key, Abilities(key, unproven, unproven, unproven, unproven)) for key in keys}
    model = _Model(replace(_settled(observed), abilities=known), schedule, abilities)
    for _ in range(MOST_ROUNDS):
        before, steps = status, len(model.steps)
        decided = advance(schedule, timeline, status, model.observed, at)
        status = decided.status
        for action in decided.actions:
            model.take(action, budgets)
        if status.transition is None and not decided.actions:
            break
        model.pass_round()
        if _progress(status) == _progress(before) and len(model.steps) == steps:
            break
    waiting = tuple(
        WaitingWorker(worker.node, worker.step, worker.reason)
        for worker in status.workers
        if status.transition is not None and worker.step not in RESTING and worker.reason is not None
    )
    phase = current.phase if current is not None else PhaseName("")
    return Forecast(phase, at, tuple(model.steps), waiting)


def with_configs(
    found: Forecast, schedule: Schedule, status: ScheduleStatus, nodes: Mapping[PhaseName, frozenset[NodeName]]
) -> Forecast:
    """Return a forecast with the vGPU configs that nodes get in its phase; `nodes` has those of each phase."""
    known = {node.node: node.vgpu_config for node in status.nodes if node.is_applied}
    steps = tuple(
        PlannedStep(node, action, phase.vgpu_config)
        for phase in schedule.phases
        if phase.name == found.phase and phase.vgpu_config is not None
        for node in sorted(nodes.get(phase.name, frozenset()))
        if known.get(node) != phase.vgpu_config
        for action in (PlannedAction.SET_VGPU_CONFIG, PlannedAction.STOP_VMS)
        if action is PlannedAction.SET_VGPU_CONFIG or phase.vms is VmPolicy.STOP
    )
    starts = (  # of VMs that a phase has stopped which ends then
        PlannedStep(vm.node, PlannedAction.START, vm.where)
        for vm in status.vms
        if vm.phase != found.phase and vm.step is not VmStep.WAIT
    )
    return replace(found, steps=(*starts, *found.steps, *steps))


def assumed_vms(status: ScheduleStatus, nodes: Mapping[NodeName, WorkerNode], leave: Leave) -> Mapping[VmKey, WorkerVm]:
    """Return VMs as the nodes suggest, for the forecast of a hypervisor that can't be asked; never for a decision.

    Each node has the VM that the status has matched it with, or one of its own name. The VM of a Ready node is on, and
    a VM has the vGPU type of the phase that was reached last.
    """
    known = {worker.node: worker for worker in status.workers}
    off = Power.SUSPENDED if leave is Leave.SUSPEND else Power.OFF
    found = dict[VmKey, WorkerVm]()
    for name, node in nodes.items():
        worker = known.get(name)
        is_known = worker is not None and bool(worker.vm)
        key = worker.vm if worker is not None and is_known else VmKey(f"vm-of-{name}")
        vm_name = worker.vm_name if worker is not None and is_known else str(name)
        last = node.types.get(status.phase) if status.phase is not None else None
        types = (last,) if last is not None else tuple(node.types.values())[:1]
        power = Power.ON if node.is_ready else Power.OFF if len({*node.types.values()}) > 1 else off
        found[key] = WorkerVm(key, vm_name, node.system_uuid.lower(), power, types)
    return found


def _settled(observed: ScheduleObservation) -> ScheduleObservation:
    """Return what was observed without what passes by itself: pods that end, and how old a Lease's renewal is."""
    nodes = {
        name: replace(
            node, renewed_at=None, cordoned_for_s=CORDON_SETTLES_S if node.is_unschedulable else node.cordoned_for_s
        )
        for name, node in observed.nodes.items()
    }
    pods = {name: tuple(pod for pod in found if not pod.is_ending) for name, found in observed.pods.items()}
    vms = observed.vms
    if not isinstance(vms, VmsUnknown):
        vms = {key: replace(vm, is_changing=False) for key, vm in vms.items()}
    return replace(observed, nodes=nodes, pods=pods, vms=vms)


def _progress(status: ScheduleStatus) -> tuple[object, ...]:
    """Return how far a status is, without the renewals that each round has."""
    return status.phase, status.transition, tuple((worker.node, worker.step) for worker in status.workers)

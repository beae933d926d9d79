"""How far a VgpuSchedule is: the phase that holds, a transition under way, and each worker with its step.

The status is written before the steps that follow from it are taken, so that a controller that starts again goes on
from what was intended. No step depends on it alone: what was done is observed.
"""

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt.model.workers.observed import NodeVm
from gpuvirt.model.workers.spec import PhaseName


class WorkerStep(StrEnum):
    """The step of a worker: the event that it waits for, or the end of its transition."""

    NONE = "None"
    """Nothing has been decided yet."""
    MATCH = "Match"
    """Its VM has to be found."""
    READ = "Read"
    """The hypervisor has to answer."""
    CHECK = "Check"
    """All VMs that leave have to be able to, before the first pod is evicted."""
    CORDON = "Cordon"
    DRAIN = "Drain"
    DETACH = "Detach"
    LEAVE = "Leave"
    """Its VM has to be seen suspended, or off."""
    AWAY = "Away"
    """It has left; the end of its transition."""
    SET_TYPE = "SetType"
    """Its VM, which is off, has to be seen with the vGPU type of the phase."""
    WAIT_FOR_GPU = "WaitForGpu"
    START = "Start"
    HEARTBEAT = "Heartbeat"
    UNCORDON = "Uncordon"
    SERVING = "Serving"
    """It works; the end of its transition."""


MOST_LAG = timedelta(hours=1)
"""How far the last switch may be in the future of a clock that lags; one further away was written by a wrong clock."""
NO_VM = VmKey("")
RESTING = frozenset({WorkerStep.AWAY, WorkerStep.SERVING})


class Worker(msgspec.Struct, frozen=True):
    """One worker, as the status keeps it."""

    node: NodeName
    node_uid: str = ""
    """Empty once the Node object was seen to be missing."""
    phases: tuple[PhaseName, ...] = ()
    vm: VmKey = NO_VM
    """The VM that the node was matched with; empty until then."""
    vm_name: str = ""
    step: WorkerStep = WorkerStep.NONE
    since: datetime | None = None
    """When the step began."""
    renewal: str | None = None
    """`renewTime` of the node's Lease when its VM was first seen on; empty if it had none, None before."""
    is_held: bool = False
    """Whether the step was not done in time; it is tried again now and then."""
    forced: int = 0
    """The pods that were deleted against budgets in this transition."""
    reason: Reason | None = None
    """Why the step is not done."""
    types: tuple[tuple[PhaseName, str], ...] = ()
    """The vGPU types of its VM by phase, where profiles give it one: known while its Node object is missing, too."""


class ConfiguredNode(msgspec.Struct, frozen=True):
    """One node with GPUs of its own, whose vGPU config follows the phase."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    reason: Reason | None = None
    """Why the vGPU config is not applied; None once the node's agent reports that it is."""

    @property
    def is_applied(self) -> bool:
        """Whether the GPUs of the node have the vGPU config."""
        return self.reason is None


class Transition(msgspec.Struct, frozen=True):
    """A change of the phase that is under way."""

    phase: PhaseName
    """The phase that begins."""
    began: datetime
    generation: int = 0
    """The spec that it follows. A spec with other fields ends all holds."""


class SwitchCause(StrEnum):
    """Why a switch began."""

    SCHEDULE = "Schedule"
    """The phase's cron line, or the end of an override."""
    OVERRIDE = "Override"
    """An override of the spec."""
    BY_HAND = "ByHand"
    """An override that `gpuvirt schedule switch` has written, which names the user."""
    SPEC = "Spec"
    """Another change of the spec, as the first one."""
    WORKERS = "Workers"
    """Other workers, in the same phase."""
    GIVEN_UP = "GivenUp"
    """The phase before could not be reached before its end."""


class Outcome(StrEnum):
    """How a switch ended, if it has."""

    UNDER_WAY = "UnderWay"
    REACHED = "Reached"
    REPLACED = "Replaced"
    """Another switch began first."""
    GIVEN_UP = "GivenUp"


class PastSwitch(msgspec.Struct, frozen=True):
    """One of the last switches, with that under way."""

    phase: PhaseName
    before: PhaseName | None
    """The phase that it left; None for the first one."""
    began: datetime
    cause: SwitchCause = SwitchCause.SCHEDULE
    by: str = ""
    """The user who has asked for it; empty where the spec names none."""
    ended: datetime | None = None
    """None while it is under way."""
    outcome: Outcome = Outcome.UNDER_WAY
    evicted: int = 0
    """The evictions that the API server has accepted."""
    deleted: int = 0
    """The pods that were deleted against their budgets."""


class ScheduleStatus(msgspec.Struct, frozen=True):
    """The status of one schedule."""

    phase: PhaseName | None = None
    """The phase that was reached last."""
    transition: Transition | None = None
    announced: PhaseName | None = None
    """The phase whose beginning is announced."""
    workers: tuple[Worker, ...] = ()
    generation: int = 0
    """The spec that the status follows."""
    nodes: tuple[ConfiguredNode, ...] = ()
    """The nodes whose vGPU config the current phase sets."""
    vms: tuple[NodeVm, ...] = ()
    """The VMs of such nodes that a phase waits for, stops or has stopped."""
    last_switch: datetime | None = None
    """When the phase that the status follows began, by the spec."""
    given_up: Transition | None = None
    """The current phase, when it began, and by which spec, if it can't be reached before its end."""
    history: tuple[PastSwitch, ...] = ()
    """The last switches, the newest first."""

    @property
    def waiting(self) -> tuple[Reason, ...]:
        """The reasons why the phase, workers and nodes wait."""
        workers = (self.unreached, *(worker.reason for worker in self.workers))
        return (*(reason for reason in workers if reason is not None), *self.waiting_nodes)

    @property
    def unreached(self) -> Reason | None:
        """Why the current phase is not aimed at any more; None if it is."""
        return (
            Reason(
                ReasonCode.PHASE_GIVEN_UP,
                f"phase {self.given_up.phase}",
                "was given up, because its switch was held until shortly before its end; the phase before it is back",
                fix="see the events of the schedule for what held the switch; gpuvirt schedule switch tries the phase"
                " again",
            )
            if self.given_up is not None
            else None
        )

    @property
    def waiting_nodes(self) -> tuple[Reason, ...]:
        """The reasons why nodes with GPUs of their own, and their VMs, wait."""
        found = (*(node.reason for node in self.nodes), *(vm.reason for vm in self.vms))
        return tuple(reason for reason in found if reason is not None)

    @property
    def held(self) -> tuple[Worker, ...]:
        """The workers whose step was not done in time."""
        return tuple(worker for worker in self.workers if worker.is_held)

    @property
    def held_vms(self) -> tuple[NodeVm, ...]:
        """The VMs of nodes with GPUs of their own whose step was not done in time."""
        return tuple(vm for vm in self.vms if vm.is_held)


def not_before_switch(now: datetime, last_switch: datetime | None) -> datetime:
    """Return `now`, or the last switch if that is later: a clock that lags would undo it.

    The clock of a VM that was paused lags until it is set, and its controller may lead after another one has switched.
    """
    if last_switch is None or last_switch - now > MOST_LAG:
        return now
    return max(now, last_switch)

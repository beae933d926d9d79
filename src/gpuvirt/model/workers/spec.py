"""The spec of a VgpuSchedule: phases with workers or vGPU configs, when each begins, and how workers leave."""

from datetime import datetime
from enum import StrEnum
from typing import NewType

import msgspec

PhaseName = NewType("PhaseName", str)

CORDONED_BY = "gpuvirt.io/cordoned-by"
"""The label with the schedule that has cordoned a node. Without it a cordon is an admin's, and stays."""

NODE_VM = "gpuvirt.io/vm"
"""The annotation of a node by which an admin names the VM of KubeVirt that it runs in: `workers/vm-1`."""

SAVED_STRATEGY = "gpuvirt.io/saved-run-strategy"
"""The annotation of a VM that a schedule has halted: its runStrategy, or `running` for `spec.running: true`."""


class Leave(StrEnum):
    """How the VM of a worker leaves at the end of its phase."""

    SUSPEND = "Suspend"
    SHUT_DOWN = "ShutDown"


class Begin(StrEnum):
    """When a switch takes the pods of the workers that leave."""

    IF_ALL_CAN_LEAVE = "IfAllCanLeave"
    """Once the hypervisor refuses the leaving of none of their VMs."""
    ANYWAY = "Anyway"
    """At once."""


class OnTimeout(StrEnum):
    """The policy for the pods that a drain has not ended in time."""

    HOLD = "Hold"
    """They stay, and the transition is held."""
    FORCE = "Force"
    """They are deleted, against PodDisruptionBudgets too. A guest that does not shut down loses its power."""


class VmPolicy(StrEnum):
    """The policy for KubeVirt's VMs whose vGPUs a phase's vGPU config removes."""

    WAIT = "Wait"
    """They run on, and the node waits for them."""
    STOP = "Stop"
    """They are shut down by their runStrategy, and started again when the phase ends."""


class WorkerProfile(msgspec.Struct, frozen=True):
    """The vGPU type that some workers of a phase have in it, and the labels by which pods choose it."""

    vgpu_type: str
    """As the hypervisor names it: `grid_v100-16q`. No other profile of the phase has it."""
    labels: tuple[tuple[str, str], ...] = ()
    """Keys and values that the schedule sets on the workers' nodes."""


class Phase(msgspec.Struct, frozen=True):
    """One phase; the cluster's objects say which nodes are its workers, and which profile each of them has."""

    name: PhaseName
    start: str
    """A cron line of five fields, in the schedule's time zone."""
    profiles: tuple[WorkerProfile, ...] = ()
    selected_by: tuple[str, ...] = ()
    """The keys of the labels by which the phase, its profiles and its vGPU config select nodes."""
    vgpu_config: str | None = None
    """The vGPU config of nodes with GPUs of their own; None if the phase has none."""
    vms: VmPolicy = VmPolicy.WAIT
    """The policy for VMs of these nodes whose vGPUs the vGPU config removes."""


class PhaseOverride(msgspec.Struct, frozen=True):
    """A phase that holds from one moment to another, whatever the cron lines say."""

    phase: PhaseName
    begin: datetime
    """Local time, without a zone."""
    end: datetime
    by: str = ""
    """The user who has asked for it by `gpuvirt schedule switch`; empty if the spec names none."""


class Drain(msgspec.Struct, frozen=True):
    """How a worker's pods are evicted."""

    timeout_s: float = 600.0
    on_timeout: OnTimeout = OnTimeout.HOLD
    deletes_empty_dir_data: bool = False
    """Whether pods with emptyDir volumes are evicted, as by `kubectl drain --delete-emptydir-data`."""
    deletes_bare_pods: bool = False
    """Whether pods without a controller are evicted, as by `kubectl drain --force`."""


class Schedule(msgspec.Struct, frozen=True):
    """The spec of one VgpuSchedule."""

    name: str
    time_zone: str
    phases: tuple[Phase, ...]
    overrides: tuple[PhaseOverride, ...] = ()
    announce_s: float = 900.0
    """How long before a phase begins its beginning is announced."""
    drain: Drain = Drain()
    leave: Leave = Leave.SUSPEND
    is_suspended: bool = False
    """Whether nothing is done for this schedule; a transition stays where it is."""
    generation: int = 0
    """The version of the spec."""
    has_workers: bool = True
    """Whether a phase has workers, whose VMs a hypervisor runs."""
    begin: Begin = Begin.IF_ALL_CAN_LEAVE


def phase_named(schedule: Schedule, name: PhaseName) -> Phase | None:
    """Return a phase by its name."""
    return next((phase for phase in schedule.phases if phase.name == name), None)

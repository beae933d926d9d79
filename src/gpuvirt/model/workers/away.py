"""The workers that get no pods, and the VMs that are off, because of a schedule, and when they are expected back."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt.model.workers.observed import NodeVm, VmStep
from gpuvirt.model.workers.spec import Leave, PhaseName
from gpuvirt.model.workers.status import Worker, WorkerStep


class PhaseConfig(msgspec.Struct, frozen=True):
    """The vGPU config that a phase of a schedule has for a node."""

    schedule: str
    namespace: str
    phase: PhaseName
    vgpu_config: str
    types: frozenset[str] | None = None
    """The vGPU types that it gives the node's GPUs, as configs name them; None if they are not known."""


class ScheduledNode(msgspec.Struct, frozen=True):
    """The phases of a schedule, and the state of one node in it, from the schedule's status."""

    phase: PhaseName | None
    """The phase that was reached last."""
    next_phase: PhaseName | None = None
    next_switch: str | None = None
    """When that phase begins, in words."""
    waits: str | None = None
    """Why the node does not have the vGPU config of the phase yet; None if it has."""


class NodePhase(msgspec.Struct, frozen=True):
    """A phase that has a vGPU config for a node, in words."""

    config: PhaseConfig
    message: str
    """The words that follow the node: `gets the vGPU config A10-24Q at 2026-01-05 20:00 CET by schedule gpus`."""
    is_current: bool
    """Whether the node has the vGPU config now."""

    @property
    def command(self) -> str:
        """The command that shows the schedule."""
        return f"gpuvirt schedule show {self.config.schedule} -n {self.config.namespace}"

    def brings(self, resource: str) -> bool:
        """Return whether the node offers a resource, named by its vGPU type, only once this phase has begun."""
        if self.is_current or self.config.types is None:
            return False
        return profile_name(resource.rpartition("/")[2].replace("_", " ")) in self.config.types


def node_phases(configs: Iterable[PhaseConfig], node: ScheduledNode) -> Iterator[NodePhase]:
    """Yield the phases of a schedule that have a vGPU config for a node, that of now first."""
    for config in sorted(configs, key=lambda config: (config.phase != node.phase, config.phase != node.next_phase)):
        by = f"by schedule {config.schedule}"
        if config.phase == node.phase:
            if node.waits is None:
                yield NodePhase(config, f"has the vGPU config {config.vgpu_config} {by}, phase {config.phase}", True)
            else:
                yield NodePhase(config, f"waits for the vGPU config {config.vgpu_config} {by}: {node.waits}", False)
        elif config.phase == node.next_phase and node.next_switch is not None:
            yield NodePhase(config, f"gets the vGPU config {config.vgpu_config} at {node.next_switch} {by}", False)
        else:
            text = f"gets the vGPU config {config.vgpu_config} {by} once phase {config.phase} begins"
            yield NodePhase(config, text, False)


UNDECIDED = frozenset({WorkerStep.NONE, WorkerStep.MATCH, WorkerStep.READ, WorkerStep.CHECK})
"""The steps that a worker is in before anything was done, or after: its node's cordon shows which."""


class ScheduleSeen(msgspec.Struct, frozen=True):
    """A schedule, as its status shows it."""

    name: str
    namespace: str
    leave: Leave
    phase: PhaseName | None
    """The phase that begins, or was reached last."""
    workers: tuple[Worker, ...]
    """Their names, phases, vGPU types and steps."""
    next_phase: PhaseName | None = None
    next_switch: str | None = None
    """When that phase begins, in words."""


class AwayWorker(msgspec.Struct, frozen=True):
    """A worker that gets no pods, or a VM that is off, because of a schedule."""

    schedule: str
    message: str
    """The words that follow the node, or the VM: `is suspended until 2026-01-06 07:00 CET by schedule gpus`."""
    namespace: str = ""
    """The schedule's; empty if only the node's label names the schedule."""

    @property
    def command(self) -> str:
        """The command that shows the schedule."""
        return f"gpuvirt schedule show {self.schedule}{f' -n {self.namespace}' if self.namespace else ''}"


def away_workers(
    schedules: Iterable[ScheduleSeen], cordoned_by: Mapping[NodeName, str]
) -> Mapping[NodeName, AwayWorker]:
    """Return the workers that get no pods; `cordoned_by` has the schedules that have cordoned nodes, by their labels.

    A cordon of a schedule whose status does not name the node, or can't be read, counts, too.
    """
    found = dict[NodeName, AwayWorker]()
    for schedule in schedules:
        for worker in schedule.workers:
            is_cordoned = cordoned_by.get(worker.node) == schedule.name
            if is_cordoned or worker.step not in UNDECIDED | {WorkerStep.SERVING}:
                found[worker.node] = AwayWorker(schedule.name, _message(schedule, worker), schedule.namespace)
    for node, name in cordoned_by.items():
        if node not in found:
            found[node] = AwayWorker(name, f"is cordoned by schedule {name}")
    return found


def stopped_vm(schedule: ScheduleSeen, vm: NodeVm) -> AwayWorker:
    """Return why a VM that `vms: Stop` has stopped, or stops, is off, and when it is started."""
    by = f"by schedule {schedule.name}"
    if vm.step is VmStep.START:
        why = f": {vm.reason.message}" if vm.is_held and vm.reason is not None else ""
        text = f"is being started {by}, since its phase {vm.phase} has ended{why}"
    elif schedule.phase == vm.phase and schedule.next_switch is not None:
        text = f"is stopped until {schedule.next_switch} {by}, for the vGPU config of its phase {vm.phase}"
    else:
        text = f"is stopped {by}, until its phase {vm.phase} ends"
    return AwayWorker(schedule.name, text, schedule.namespace)


def _message(schedule: ScheduleSeen, worker: Worker) -> str:
    by = f"by schedule {schedule.name}"
    is_retyped = len({vgpu_type for _, vgpu_type in worker.types}) > 1
    if schedule.phase is not None and schedule.phase in worker.phases:
        verb = "gets the vGPU type of its phase" if is_retyped else "is being started"
        return f"{verb} {by} (step {worker.step})"
    verb = "is suspended" if schedule.leave is Leave.SUSPEND and not is_retyped else "is shut down"
    if worker.step is not WorkerStep.AWAY:
        verb = f"is drained, and then {verb.removeprefix('is ')},"
    if schedule.next_phase is not None and schedule.next_phase in worker.phases and schedule.next_switch is not None:
        return f"{verb} until {schedule.next_switch} {by}"
    phases = " or ".join(worker.phases)
    return f"{verb} {by}{f' until phase {phases} begins' if phases else ''}"

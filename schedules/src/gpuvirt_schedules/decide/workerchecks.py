"""The checks of a schedule's workers and nodes before anything happens, as `gpuvirt schedule check` prints them."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.hypervisor import Abilities, Ability, Power, VmKey, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import ScheduleObservation
from gpuvirt.model.workers.spec import Leave, PhaseName, Schedule
from gpuvirt.model.workers.status import ScheduleStatus, Worker
from gpuvirt_schedules.decide.matching import prove
from gpuvirt_schedules.decide.noderows import NodeCheck
from gpuvirt_schedules.decide.profiles import keeps_type
from gpuvirt_schedules.decide.reports import ScheduleRow, ScheduleState
from gpuvirt_schedules.decide.workers import members


class WorkerCheck(msgspec.Struct, frozen=True):
    """The hypervisor's report on one worker's VM."""

    node: NodeName
    phases: tuple[PhaseName, ...]
    vm: str
    power: Power | None
    """None while no VM is matched."""
    vgpu_types: tuple[str, ...]
    suspend: Ability | None
    """The abilities are None where the hypervisor reported nothing about the VM."""
    shut_down: Ability | None
    start: Ability | None
    remarks: tuple[str, ...]
    reason: Reason | None
    """Why no call would be made for the worker."""
    set_vgpu_type: Ability | None = None
    phase_types: tuple[str, ...] = ()
    """The types that its phases give its VM, if a switch changes the type: the VM is then shut down."""

    @property
    def is_retyped(self) -> bool:
        """Whether a switch changes the vGPU type of the VM."""
        return bool(self.phase_types)

    def leaves(self, leave: Leave) -> Ability | None:
        """Return the ability by which the worker leaves at the end of its phase."""
        return self.suspend if leave is Leave.SUSPEND and not self.is_retyped else self.shut_down

    def used(self, leave: Leave) -> tuple[Ability | None, ...]:
        """Return the abilities that the schedule uses."""
        return (self.leaves(leave), self.start, *((self.set_vgpu_type,) if self.is_retyped else ()))


class ScheduleCheck(msgspec.Struct, frozen=True):
    """The checks of each worker and each node of a schedule before anything happens."""

    schedule: ScheduleRow
    leave: Leave
    hypervisor: Reason | None
    """Why the hypervisor gave no answer."""
    workers: tuple[WorkerCheck, ...]
    nodes: tuple[NodeCheck, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is known to keep the schedule from switching."""
        if self.schedule.state is ScheduleState.INVALID or self.hypervisor is not None:
            return False
        if any(node.reason is not None for node in self.nodes):
            return False
        return all(worker.reason is None and not self._refused(worker) for worker in self.workers)

    def _refused(self, worker: WorkerCheck) -> bool:
        return any(ability is None or ability.is_possible is False for ability in worker.used(self.leave))


def worker_checks(
    schedule: Schedule,
    status: ScheduleStatus,
    observed: ScheduleObservation,
    abilities: Mapping[VmKey, Abilities],
) -> Iterator[WorkerCheck]:
    """Yield what holds for each worker; `abilities` has what the hypervisor reported about VMs."""
    for worker in members(status.workers, observed, schedule.name).workers:
        node = observed.nodes.get(worker.node)
        vms = observed.vms
        vm = None if isinstance(vms, VmsUnknown) else vms.get(worker.vm)
        proof = None if isinstance(vms, VmsUnknown) else prove(worker, node, vms)
        known = abilities.get(worker.vm) if worker.vm else None
        yield WorkerCheck(
            worker.node,
            worker.phases,
            vm.name if vm is not None else worker.vm_name,
            vm.power if vm is not None else None,
            vm.vgpu_types if vm is not None else (),
            known.suspend if known is not None else None,
            known.shut_down if known is not None else None,
            known.start if known is not None else None,
            known.remarks if known is not None else (),
            proof if isinstance(proof, Reason) else None,
            known.set_vgpu_type if known is not None else None,
            _phase_types(worker, vm),
        )


def _phase_types(worker: Worker, vm: WorkerVm | None) -> tuple[str, ...]:
    """Return the types of a worker's phases; nothing if its VM keeps the one that it has."""
    keeps = keeps_type(worker, vm) if vm is not None else len({name for _, name in worker.types}) < 2
    return () if keeps else tuple(vgpu_type for _, vgpu_type in worker.types)

"""Changes one isolation unit: observes it, plans, takes the steps of a phase, and starts over until it is done.

A failed phase is rolled back, as far as this change has touched it: a GPU gets the same vGPUs, with the same ids, in
the same mode. The unit's gates let one change at a time run. A
direct command removes one vGPU or sets the vGPU scheduler in the same way.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change import driverphase
from gpuvirt.agent.change.changehost import ChangeHost, Inputs, ReportStep, changing
from gpuvirt.agent.change.gate.gate import GateFailedError, UnitBusyError
from gpuvirt.agent.change.gate.gaterecord import ALLOCATABLE, GateRecord
from gpuvirt.agent.change.observation import NOTHING, HostObservation, Learned, observe_unit
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.leasing import RefusedError, why_busy
from gpuvirt.agent.change.steps.vgpusteps import (
    MOST_ROUNDS,
    Run,
    SchedulerRefusedError,
    TypeRejectedError,
    VgpusInUseError,
    claims,
    take_all,
    verify_vfs_removable,
)
from gpuvirt.facts.ids import PciAddress, VgpuId, slot_of
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Framework, Scheduler
from gpuvirt.hardware.access.tools import Program, ToolError, ToolMissingError
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredUnit, DesiredVgpus, desired_drivers
from gpuvirt.model.change.plan import (
    DriverPlan,
    Outcome,
    Phase,
    Plan,
    VgpuPlan,
)
from gpuvirt.model.change.planner import plan_removal, plan_scheduler, plan_unit
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    CreateVgpu,
    DisableVfs,
    EnableVfs,
    LoadModule,
    RemoveVgpu,
    RollBack,
    SetMigMode,
    SetMixedSizes,
    VgpuStep,
)
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import plan_gpu
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import UnitId, slots_of
from gpuvirt.model.reasons import Reason, Seen, refusals, shortfalls

NVIDIA_DRIVER = "nvidia"
"""The driver whose VFs only sriov-manage can switch: it has no `sriov_configure` (drivers/pci/iov.c: ENOENT)."""


def obstacles(observation: HostObservation, state: UnitState, plan: Plan, phase: Phase) -> tuple[Reason, ...]:
    """Return the known reasons why a change can't be finished; none if the phase only adds to what exists.

    A reason that passes when a process or a VM ends is no obstacle to the other steps.
    """
    if isinstance(phase, DriverPlan) or not phase.destroys:
        return ()
    try:
        found = list(_obstacles(observation.change_host, state, phase, _all_steps(state, plan, phase)))
        if phase in plan.emptied:
            found += _obstacles_to_drivers(observation.change_host, plan.drivers)
        return tuple(dict.fromkeys(found))
    except RefusedError as error:
        return (error.reason,)


def _all_steps(state: UnitState, plan: Plan, phase: VgpuPlan) -> tuple[VgpuStep, ...]:
    """Return the steps of a phase, and the later step that disables VFs once the GPU carries no vGPU."""
    gpu_state, last = state.gpu_states.get(phase.gpu), DisableVfs(phase.gpu)
    carries_on_vfs = gpu_state is not None and gpu_state.host.framework is not Framework.SRIOV_VF
    waits = carries_on_vfs and phase in plan.emptied and last not in phase.steps
    has_vfs = bool(state.inventory.facts.functions[phase.gpu].virtfns)
    return (*phase.steps, last) if waits and has_vfs else phase.steps


def _obstacles(
    change_host: ChangeHost, state: UnitState, phase: VgpuPlan, steps: tuple[VgpuStep, ...]
) -> Iterator[Reason]:
    gpu_state = state.gpu_states.get(phase.gpu)
    for step in steps:
        match step:
            case DisableVfs(gpu):
                if _is_on_nvidias_driver(state.inventory, gpu):
                    yield from _missing(change_host, gpu, f"keeps its vGPUs, since a later step ({step.text})")
                if not phase.pending:
                    verify_vfs_removable(change_host.kernel, state.inventory, gpu)
            case EnableVfs(gpu) | SetMigMode(gpu) | SetMixedSizes(gpu):
                if isinstance(step, EnableVfs) and _is_on_nvidias_driver(state.inventory, gpu):
                    yield from why_no_vfs(change_host, gpu)
                proving.walked(change_host.kernel, [gpu], answered=_is_on_nvidias_driver(state.inventory, gpu))
            case RemoveVgpu(vgpu) if gpu_state is not None:
                live = next(live for live in gpu_state.host.live if live.id == vgpu)
                tuple(claims(change_host.kernel, state.inventory, gpu_state.host, live))
            case _:
                pass


def _obstacles_to_drivers(change_host: ChangeHost, plan: DriverPlan) -> Iterator[Reason]:
    """Yield why a unit's GPUs could not change their drivers, even without vGPUs and users."""
    lasting = [reason for reason in plan.refusals if not reason.code.passes]
    yield from lasting
    for step in plan.steps if not lasting else ():
        if isinstance(step, LoadModule):
            try:
                change_host.tools.demand_module(step.driver)
            except ToolError as error:
                yield refusals.prerequisite_missing(
                    next((step.address for step in plan.steps if not isinstance(step, LoadModule)), plan.unit),
                    f"needs the driver {step.driver}, which is not loaded, and the host has no such kernel module",
                    f"install the host's package of kernel modules with {step.driver}; then modprobe -n {step.driver}"
                    " finds the module",
                    Seen("", str(error)),
                )


def _is_on_nvidias_driver(inventory: Inventory, gpu: PciAddress) -> bool:
    function = inventory.facts.functions[gpu]
    return function.id.vendor == NVIDIA and function.driver == NVIDIA_DRIVER


def why_no_vfs(change_host: ChangeHost, gpu: PciAddress) -> Iterator[Reason]:
    """Yield why the VFs of a GPU on NVIDIA's driver can't be switched on: the program for that is missing."""
    yield from _missing(change_host, gpu, "carries no vGPUs, since its VFs are off and the step that switches them on")


def _missing(change_host: ChangeHost, gpu: PciAddress, what: str) -> Iterator[Reason]:
    program = Program.SRIOV_MANAGE
    try:
        change_host.tools.demand(program)
    except ToolMissingError as error:
        yield refusals.prerequisite_missing(
            gpu,
            f"{what} needs {program}, which is not installed",
            "install NVIDIA's vGPU manager on the host, or check that its container runs on this node (label"
            " nvidia.com/gpu.deploy.vgpu-manager=true)",
            Seen("", error.output or str(error)),
        )


def put_back(last: HostObservation, gpu: PciAddress, before: GpuState | None, run: Run) -> Iterator[Reason]:
    """Bring a GPU back to the vGPUs that it carried before; yield why that failed.

    Only vGPUs that the change has created are removed. A change that the kernel has blocked is not rolled back, since
    the former vGPUs may no longer be desired: the next plan starts from the vGPUs that exist.
    """
    if not run.taken or run.change.expired:
        return
    run.report(RollBack(gpu))
    run.change.roll_back()
    if before is None:
        return
    created = {step.vgpu for step in run.taken if isinstance(step, CreateVgpu)}
    desired = DesiredVgpus(Counter(before.types.values()), _sizes(before))
    for _ in range(MOST_ROUNDS):
        unit = last.inventory.gpus[gpu].unit
        seen = observe_unit(last.change_host, last.inputs, unit, last.inventory, [gpu])
        if gpu not in seen.inventory.gpus:  # the outcome of the change says so
            return
        run.change.plan_from(seen.inventory, seen.account.allocations.unmapped)
        others = {name for name, vgpu in seen.inventory.vgpus.items() if vgpu.gpu == gpu and name not in created}
        learned = Learned(remembered=before.types, in_use=dict.fromkeys(others, "a program other than this change"))
        state = replace(seen, learned={gpu: learned}).asked_state(gpu, desired)
        back = plan_gpu(seen.inventory.facts, gpu, state, desired)
        if not back.steps:
            yield from back.refusals
            return
        try:
            take_all(last.change_host, seen.inventory, state, back, run)
        except RefusedError as error:
            yield error.reason
            return


def _sizes(before: GpuState) -> Sizes | None:
    mixed = before.smi.modes.mixed_sizes if before.smi is not None else None
    if not isinstance(mixed, bool):
        return None
    return Sizes.MIXED if mixed else Sizes.EQUAL


def apply(
    change_host: ChangeHost,
    unit: UnitId,
    desired: DesiredUnit,
    inputs: Inputs,
    run: Run,
    first: Inventory | None = None,
) -> Outcome:
    """Bring a unit to its desired state, without unbinding or removing a device that is in use.

    `first` is an earlier inventory of the host; without it the host is scanned for the members of the unit. Raises
    UnitBusyError.
    """
    first = first or build_inventory(scan(change_host.kernel))
    with changing(change_host, unit, first, inputs.readings) as (by_children, passed), run.change.under_way(passed):
        outcome = UnitChange(by_children, unit, desired, inputs, run, first).run()
        if outcome.reasons and (circumstances := run.change.circumstances) is not None:
            passed.hold(outcome.reasons[0], circumstances)
        return outcome


def foresee(observation: HostObservation, unit: UnitId, desired: DesiredUnit) -> Outcome:
    """Return why a change of a unit would be refused even if no pod used its devices."""
    state = observation.unit_state(desired)
    plan = plan_unit(state, unit, desired)
    hindered = hindrances(observation, state, plan)
    return Outcome(vgpus={phase.gpu: (*phase.refusals, *hindered[phase.gpu]) for phase in plan.vgpus})


def with_unseen_users(observation: HostObservation, phase: VgpuPlan) -> HostObservation:
    """Return the observation with the processes, missing from `/proc`, that have vGPUs open which a phase removes."""
    gpu, state, users = phase.gpu, observation.gpu_state(phase.gpu), dict[VgpuId, str]()
    kernel = observation.change_host.kernel
    removed = {step.vgpu for step in phase.steps if isinstance(step, RemoveVgpu)}
    if state is None or not removed or not _may_open(observation, observation.inventory.gpus[gpu].unit):
        return observation
    with contextlib.suppress(RefusedError):  # unknown: `obstacles` has the reason
        for live in (live for live in state.host.live if live.id in removed):
            for claim in claims(kernel, observation.inventory, state.host, live):
                if (user := why_busy(kernel, claim.group)) is not None:
                    users[live.id] = user
    return replace(observation, learned={**observation.learned, gpu: Learned(in_use=users)}) if users else observation


def unseen_users(observation: HostObservation, plan: DriverPlan) -> Iterator[Reason]:
    """Yield why groups that a plan leases can't be leased now: a process that `/proc` does not show has them open."""
    for group in plan.leases if _may_open(observation, plan.unit) else ():
        if (user := why_busy(observation.change_host.kernel, group)) is not None:
            subject = observation.inventory.groups[group][0]
            yield refusals.in_use(subject, (), forcible=False, unseen=user)


def _may_open(observation: HostObservation, unit: UnitId) -> bool:
    """Return whether no change of a unit is under way, which may lease its groups; the gate refuses a second change."""
    gate, inventory = observation.change_host.gates.host, observation.inventory
    try:
        found = [gate.read(slot) for slot in slots_of(inventory.facts.functions, inventory.units.get(unit, ()))]
    except GateFailedError:
        return False  # unknown: the change fails at the gate, with the reason
    return all(isinstance(record, GateRecord) and record.state in ALLOCATABLE for record in found)


def hindrances(observation: HostObservation, state: UnitState, plan: Plan) -> Mapping[PciAddress, tuple[Reason, ...]]:
    """Return the obstacles to the vGPUs of a plan, by GPU."""
    return {phase.gpu: obstacles(observation, state, plan, phase) for phase in plan.vgpus}


class UnitChange(msgspec.Struct):
    """One change of a unit, under the locks of its gates."""

    change_host: ChangeHost
    unit: UnitId
    desired: DesiredUnit
    inputs: Inputs
    steps: Run
    inventory: Inventory
    """The host as observed last."""
    _learned: dict[PciAddress, Learned] = msgspec.field(default_factory=dict)
    _before: dict[PciAddress, GpuState | None] = msgspec.field(default_factory=dict)
    """The GPUs whose vGPUs were changed, with their state before."""
    _ended: dict[PciAddress | UnitId, tuple[Reason, ...]] = msgspec.field(default_factory=dict)
    """The phases that this change does not try again, by GPU or unit."""
    _rounds: Counter[PciAddress | UnitId] = msgspec.field(default_factory=Counter)
    _rolled_back: bool = False
    """Whether a phase was rolled back: the change takes no further phase."""

    def run(self) -> Outcome:
        """Take phase after phase; return why the unit is not in its desired state."""
        while True:
            if len(gone := self._gone()) == len(self.desired):
                return Outcome(vgpus=gone)
            observation = self._observe()
            if len(gone := self._gone()) == len(self.desired):
                return Outcome(vgpus=gone)
            state = observation.unit_state(self.desired)
            plan = plan_unit(state, self.unit, self.desired)
            phase = self._next(observation, state, plan)
            if phase is None:
                if plan.drivers.met and state.journal.open:
                    driverphase.settle(self.change_host, state, plan.drivers, self._heads(state))
                vgpus = {phase.gpu: self._reasons(phase) for phase in plan.vgpus}
                drivers = self._ended.get(self.unit, plan.drivers.refusals)
                hosts = self.inventory.facts.vgpu_hosts
                return Outcome(drivers, {**vgpus, **self._gone()}, [hosts[gpu] for gpu in self._before if gpu in hosts])
            self._take(observation, state, phase)

    def _observe(self) -> HostObservation:
        named = [gpu for gpu, target in self.desired.items() if target.vgpus is not None]
        seen = observe_unit(self.change_host, self.inputs, self.unit, self.inventory, named)
        functions, members = seen.inventory.facts.functions, seen.inventory.units.get(self.unit, ())
        if moved := [gpu for gpu in self.desired if gpu in functions and gpu not in members]:
            raise UnitBusyError(f"{self.unit}: GPU {moved[0]} has moved to another isolation unit, which is not locked")
        self.inventory, self.inputs = seen.inventory, seen.inputs
        self.steps.change.plan_from(seen.inventory, seen.account.allocations.unmapped)
        return replace(seen, learned={gpu: self._known(gpu) for gpu in self.desired})

    def _known(self, gpu: PciAddress) -> Learned:
        """Return the observed state of a GPU; new vGPUs get the ids that vGPUs of their types had before."""
        before = self._before.get(gpu)
        return replace(self._learned.get(gpu, NOTHING), remembered=before.types if before is not None else {})

    def _next(self, observation: HostObservation, state: UnitState, plan: Plan) -> Phase | None:
        """Return the next phase to take, None if no phase can be taken."""
        if self._rolled_back:
            return None
        for phase in plan.ready:
            subject = _subject(phase)
            if subject in self._ended:
                continue
            begins = isinstance(phase, VgpuPlan) and phase.gpu not in self._before
            if begins and (hindered := obstacles(observation, state, plan, phase)):
                self._ended[subject] = hindered
                continue
            if self._rounds[subject] == MOST_ROUNDS:
                self._ended[subject] = (
                    refusals.failed(
                        f"the vGPUs are not as desired after {MOST_ROUNDS} rounds of steps without an error",
                        subject,
                        fix=shortfalls.OTHER_MAKERS,
                    ),
                )
                continue
            return phase
        return None

    def _take(self, observation: HostObservation, state: UnitState, phase: Phase) -> None:
        self._rounds[_subject(phase)] += 1
        if isinstance(phase, DriverPlan):
            heads = self._heads(state)
            reasons = driverphase.take(self.change_host, state, phase, self._observe_drivers, self.steps, heads)
            if ended := reasons or phase.left_driverless:
                self._ended[self.unit] = ended
            self._rolled_back = bool(reasons)
            return
        gpu = phase.gpu
        gpu_state, learned = state.gpu_states.get(gpu), self._learned.get(gpu, NOTHING)
        self._before.setdefault(gpu, gpu_state)
        try:
            take_all(self.change_host, state.inventory, gpu_state, phase, self.steps)
        except TypeRejectedError as error:
            (seen,) = error.reason.places
            self._learned[gpu] = replace(learned, refused={**learned.refused, error.parent: seen})
        except VgpusInUseError as error:
            self._learned[gpu] = replace(learned, in_use={**learned.in_use, **error.users})
        except SchedulerRefusedError as error:
            self._ended[gpu] = (error.reason,)
        except RefusedError as error:
            self._ended[gpu] = (error.reason, *put_back(observation, gpu, self._before[gpu], self.steps))
            self._rolled_back = True

    def _heads(self, state: UnitState) -> list[PciAddress]:
        """Return all functions of the slots that have a desired driver, and the VFs that have one themselves."""
        heads, functions = desired_drivers(self.desired), state.inventory.facts.functions
        parts = [head for head in heads if head in functions and functions[head].is_gpu_part]
        slots = (slot_of(head) for head in heads if head not in parts)
        return [*parts, *(function for slot in slots for function in state.inventory.slots.get(slot, ()))]

    def _observe_drivers(self) -> UnitState:
        """Observe the unit during a driver change, before a rollback. The permission to force does not apply to it."""
        observation = replace(self._observe(), inputs=replace(self.inputs, forced=False))
        return observation.with_drivers(observation.vgpu_state({}), list(self.desired))

    def _reasons(self, plan: VgpuPlan) -> tuple[Reason, ...]:
        reasons = self._ended.get(plan.gpu, (*plan.refusals, *plan.pending))
        refused = self._learned.get(plan.gpu, NOTHING).refused
        quarantined = (shortfalls.type_rejected(parent, seen) for parent, seen in sorted(refused.items()))
        return (*reasons, *quarantined)

    def _gone(self) -> Mapping[PciAddress, tuple[Reason, ...]]:
        gpus, functions = self.inventory.gpus, self.inventory.facts.functions
        present = {gpu for gpu, target in self.desired.items() if gpu in (functions if target.vgpus is None else gpus)}
        return {gpu: (shortfalls.gone(gpu),) for gpu in self.desired if gpu not in present}


def _subject(phase: Phase) -> PciAddress | UnitId:
    return phase.unit if isinstance(phase, DriverPlan) else phase.gpu


def remove_vgpu(
    change_host: ChangeHost, gpu: PciAddress, vgpu: VgpuId, inputs: Inputs, report: ReportStep, first: Inventory
) -> tuple[Reason, ...]:
    """Remove one vGPU, or return why it stays; `first` is an earlier inventory of the host. Raises UnitBusyError."""
    return _changed(change_host, gpu, inputs, report, first, lambda seen: plan_vgpu_removal(seen, gpu, vgpu))


def set_scheduler(
    change_host: ChangeHost, gpu: PciAddress, scheduler: Scheduler, inputs: Inputs, report: ReportStep, first: Inventory
) -> tuple[Reason, ...]:
    """Set a GPU's vGPU scheduler, which lasts until its driver is loaded again; return why not, or why not yet."""
    return _changed(change_host, gpu, inputs, report, first, lambda seen: plan_scheduling(seen, gpu, scheduler))


def plan_vgpu_removal(seen: HostObservation, gpu: PciAddress, vgpu: VgpuId) -> VgpuPlan:
    """Return the plan that removes one vGPU."""
    return plan_removal(seen.vgpu_state({gpu: DesiredVgpus()}), gpu, vgpu)


def plan_scheduling(seen: HostObservation, gpu: PciAddress, scheduler: Scheduler) -> VgpuPlan:
    """Return the plan that sets the scheduler of a GPU."""
    return plan_scheduler(seen.vgpu_state({gpu: DesiredVgpus(scheduler=scheduler)}), gpu, scheduler)


def _changed(
    change_host: ChangeHost,
    gpu: PciAddress,
    inputs: Inputs,
    report: ReportStep,
    first: Inventory,
    plan: Callable[[HostObservation], VgpuPlan],
) -> tuple[Reason, ...]:
    unit = first.gpus[gpu].unit
    change = by_hand(unit, inputs.newest)
    with changing(change_host, unit, first, inputs.readings) as (by_children, passed), change.under_way(passed):
        seen = observe_unit(by_children, inputs, unit, first, [gpu])
        if gpu not in seen.inventory.gpus:
            return (shortfalls.gone(gpu),)
        found, run = plan(seen), Run(report, change)
        run.change.plan_from(seen.inventory, seen.account.allocations.unmapped)
        try:
            take_all(by_children, seen.inventory, seen.gpu_state(gpu), found, run)
        except VgpusInUseError as error:
            found = plan(replace(seen, learned={gpu: Learned(in_use=error.users)}))
        except RefusedError as error:
            return (error.reason,)
        return (*found.refusals, *found.pending)

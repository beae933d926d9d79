"""The plans for vGPUs: which vGPUs are desired, what nvidia-smi has reported, and the plans that follow.

Nothing here waits or changes the host.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Scheduler, SmiReport
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.change.desired import DesiredDrivers, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.planner import plan_vgpus
from gpuvirt.model.change.vgpus import invalidvgpus
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet, DesiredTypes, config_gpus, resolve
from gpuvirt.model.change.vgpus.gpustate import (
    NAMESPACE,
    GpuState,
    Holding,
    gpu_state_of,
    with_report,
)
from gpuvirt.model.change.vgpus.modes import Questions, questions
from gpuvirt.model.change.vgpus.scheduling import SchedulerContext, SchedulerReport, scheduler_context_of
from gpuvirt.model.desired.configchoice import ConfigGpu
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode, Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Source
from gpuvirt.model.inventory.inventory import Inventory

WHOLE = frozenset({DesiredMode.PASSTHROUGH, *FOR_CONTAINERS})


class VgpuPlans:
    """The plans for the vGPUs of one node."""

    def __init__(self) -> None:
        self.config_set: ConfigSet | None = None
        """The vGPU configs, None if not observed yet."""
        self.config: ConfigName | None = None
        """The name of the desired vGPU config, None if there is none or it was not observed yet."""
        self.desired_types = DesiredTypes()
        """The desired vGPU types by GPU, or why they are unknown."""
        self.invalid: tuple[InvalidDesired, ...] = ()
        """The desired vGPUs that their GPUs can't carry."""
        self.by_gpu: dict[PciAddress, tuple[DesiredVgpus, VgpuPlan]] = {}
        """The desired vGPUs of each GPU, and its plan."""
        self.desired: Mapping[PciAddress, DesiredGpu] = {}
        """The desired state of each GPU; gpuvirt does not change the other GPUs."""
        self.smi: dict[PciAddress, tuple[DesiredVgpus, SmiReport]] = {}
        """The reports of nvidia-smi, each with the desired vGPUs for which it was asked."""
        self.questions: Mapping[PciAddress, tuple[DesiredVgpus, Questions]] = {}
        """The questions that nvidia-smi must answer before these GPUs can be planned."""
        self.time_shared: Mapping[PciAddress, SchedulerContext] = {}
        """The GPUs in mode vgpu whose vGPUs share time, with the contexts of their schedulers."""
        self.schedulers: dict[PciAddress, SchedulerReport] = {}
        """The reported schedulers of these GPUs; a report is dropped when its context changes."""

    @property
    def undesired(self) -> frozenset[VgpuId]:
        """The vGPUs to remove, now or when they are free."""
        return frozenset[VgpuId]().union(*(plan.undesired for _, plan in self.by_gpu.values()))

    @property
    def configs(self) -> Mapping[PciAddress, str]:
        """The vGPU config that is applied to each GPU."""
        with_vgpus = (gpu for gpu, (desired_vgpus, _) in self.by_gpu.items() if not desired_vgpus.whole)
        return dict.fromkeys((*with_vgpus, *self.questions), self.config.name if self.config is not None else "")

    def observe_smi(self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, at_s: float) -> None:
        """Take nvidia-smi's report on a GPU, which was read for these desired vGPUs."""
        scheduler_context = self.time_shared.get(gpu)
        self.smi[gpu] = vgpus, report
        if report.scheduler is not None and scheduler_context is not None:
            self.observe_scheduler(gpu, SchedulerReport(report.scheduler, scheduler_context, at_s))

    def forget_smi(self, gpu: PciAddress) -> None:
        """Drop nvidia-smi's reports on a GPU, since they may be outdated."""
        self.smi.pop(gpu, None)
        self.schedulers.pop(gpu, None)

    def observe_scheduler(self, gpu: PciAddress, report: SchedulerReport) -> bool:
        """Take nvidia-smi's report on a GPU's scheduler, also for the GPU's plan; return whether that is a change."""
        before, planned = self.schedulers.get(gpu), self.smi.get(gpu)
        self.schedulers[gpu] = report
        if planned is not None and planned[1].scheduler is not None and isinstance(report.scheduler, Scheduler):
            self.smi[gpu] = planned[0], replace(planned[1], scheduler=report.scheduler)
        return before is None or replace(before, at_s=report.at_s) != report

    def conclude(
        self,
        inventory: Inventory,
        holdings: tuple[Holding, ...],
        desired_types: Modes,
        drivers: DesiredDrivers,
        named: Mapping[str, Source],
    ) -> None:
        """Conclude the desired vGPUs of each GPU, and the plans toward them.

        `named` are the GPUs whose mode is set by address, with the source that names each.
        """
        modes = {gpu: desired_types.of(gpu) for gpu in inventory.gpus}
        with_vgpus = [gpu for gpu, mode in modes.items() if mode is DesiredMode.VGPU]
        whole = [gpu for gpu, mode in modes.items() if mode in WHOLE]
        functions = inventory.facts.functions
        found = {
            gpu: gpu_state_of(inventory, gpu, holdings, NAMESPACE) for gpu in (inventory.gpus if with_vgpus else whole)
        }
        states = {gpu: self._with_report(functions[gpu], state) for gpu, state in found.items()}
        self.time_shared = dict(_scheduler_contexts(inventory, with_vgpus, states))
        gpus = self._resolve(inventory, found if with_vgpus else {})
        vgpus = dict.fromkeys(whole, DesiredVgpus(whole=True))
        vgpus |= {
            gpu: desired_vgpus for gpu, desired_vgpus in self.desired_types.desired_by_gpu.items() if gpu in with_vgpus
        }
        self.questions = {
            gpu: (vgpus[gpu], asked) for gpu, asked in self._questions(inventory, with_vgpus, vgpus, found)
        }
        managed = drivers.keys() | vgpus.keys()
        self.desired = {gpu: DesiredGpu(drivers.get(gpu), vgpus.get(gpu)) for gpu in sorted(managed)}
        self.by_gpu = {
            gpu: (desired_vgpus, plan_vgpus(functions[gpu], states[gpu], self.desired[gpu]))
            for gpu, desired_vgpus in vgpus.items()
            if gpu not in self.questions
        }
        self.invalid = tuple(self._invalid([gpu for gpu in gpus if gpu.address in with_vgpus], named)) if gpus else ()
        self.schedulers = {
            gpu: report
            for gpu, report in self.schedulers.items()
            if report.scheduler_context == self.time_shared.get(gpu)
        }

    def _questions(
        self,
        inventory: Inventory,
        with_vgpus: Iterable[PciAddress],
        vgpus: Mapping[PciAddress, DesiredVgpus],
        found: Mapping[PciAddress, GpuState | None],
    ) -> Iterator[tuple[PciAddress, Questions]]:
        for gpu in with_vgpus:
            desired_vgpus, state = vgpus.get(gpu), found[gpu]
            if desired_vgpus is None or state is None or self.smi.get(gpu, (None,))[0] == desired_vgpus:
                continue
            if (asked := questions(inventory.facts.functions[gpu], state, desired_vgpus)) is not None:
                yield gpu, asked

    def waits_for_processes(self, inventory: Inventory | None, entries: Iterable[Entry]) -> bool:
        """Return whether a plan waits for a VM whose pod is gone."""
        if inventory is None or not any(plan.pending for _, plan in self.by_gpu.values()):
            return False
        users, pods = inventory.facts.users or {}, {entry.target.vgpu for entry in entries}
        groups = (vgpu.live.group for vgpu_id, vgpu in inventory.vgpus.items() if vgpu_id not in pods)
        return any(isinstance(group, int) and users.get(IommuGroup(group)) for group in groups)

    def plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return the plan for the vGPUs of a GPU, an empty one if it has no desired vGPUs."""
        planned = self.by_gpu.get(gpu)
        return planned[1] if planned is not None else VgpuPlan(gpu)

    def _resolve(self, inventory: Inventory, found: Mapping[PciAddress, GpuState | None]) -> list[ConfigGpu]:
        """Resolve the desired vGPUs; return the GPUs in the form that configs choose from, none without a config."""
        if not found or self.config_set is None or self.config is None:
            self.desired_types = DesiredTypes()
            return []
        gpus = config_gpus(inventory, {gpu: state for gpu, state in found.items() if state is not None})
        self.desired_types = resolve(self.config, self.config_set, gpus)
        return gpus

    def _invalid(self, with_vgpus: Collection[ConfigGpu], named: Mapping[str, Source]) -> Iterator[InvalidDesired]:
        if self.config is None or self.desired_types.problem is not None:
            return
        yield from invalidvgpus.without_vgpus(named, self.config.name, self.desired_types.desired_by_gpu, with_vgpus)
        for gpu in with_vgpus:
            if gpu.address in self.by_gpu:
                plan = self.by_gpu[gpu.address][1]
                yield from invalidvgpus.unknown_types(self.config.source, gpu, self.config.name, plan.refusals)

    def _with_report(self, function: PciFunction, gpu_state: GpuState | None) -> GpuState | None:
        observed = self.smi.get(function.address)
        return gpu_state if gpu_state is None or observed is None else with_report(gpu_state, function, observed[1])


def _scheduler_contexts(
    inventory: Inventory, with_vgpus: Iterable[PciAddress], states: Mapping[PciAddress, GpuState | None]
) -> Iterator[tuple[PciAddress, SchedulerContext]]:
    """Yield the GPUs whose vGPUs share time, with the contexts of their schedulers."""
    for gpu in with_vgpus:
        state = states[gpu]
        scheduler_context = scheduler_context_of(inventory.facts.functions[gpu], state) if state is not None else None
        if scheduler_context is not None:
            yield gpu, scheduler_context

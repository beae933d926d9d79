"""Plans the vGPUs of one node: which are desired, what nvidia-smi has reported, the plans and questions that follow.

Plans see the states of the node's GPUs; a GPU whose state is that of the last plans keeps its plan.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Framework, Scheduler, SmiReport
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
    has_live,
    holdings_by_function,
    holdings_on,
    with_report,
)
from gpuvirt.model.change.vgpus.modes import Questions, questions
from gpuvirt.model.change.vgpus.scheduling import SchedulerContext, SchedulerReport, scheduler_context_of
from gpuvirt.model.desired.configchoice import ConfigGpu
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode, Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Source
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.inventory.inventory import Inventory


class SmiMemory(msgspec.Struct, frozen=True):
    """The reports of nvidia-smi on the GPUs of one node."""

    reports: Mapping[PciAddress, tuple[DesiredVgpus, SmiReport]] = msgspec.field(default_factory=dict)
    """Each report with the desired vGPUs for which it was asked."""
    schedulers: Mapping[PciAddress, SchedulerReport] = msgspec.field(default_factory=dict)
    """The reported schedulers of GPUs whose vGPUs share time; a report is dropped when its context changes."""

    def with_report(
        self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, context: SchedulerContext | None, at_s: float
    ) -> "SmiMemory":
        """Return the memory with a report on a GPU, which was read for these desired vGPUs."""
        found = replace(self, reports={**self.reports, gpu: (vgpus, report)})
        if report.scheduler is None or context is None:
            return found
        return found.with_scheduler(gpu, SchedulerReport(report.scheduler, context, at_s))

    def with_scheduler(self, gpu: PciAddress, report: SchedulerReport) -> "SmiMemory":
        """Return the memory with a report on a GPU's scheduler, also for the GPU's plan."""
        planned, reports = self.reports.get(gpu), self.reports
        if planned is not None and planned[1].scheduler is not None and isinstance(report.scheduler, Scheduler):
            reports = {**reports, gpu: (planned[0], replace(planned[1], scheduler=report.scheduler))}
        return SmiMemory(reports, {**self.schedulers, gpu: report})

    def without(self, gpu: PciAddress) -> "SmiMemory":
        """Return the memory without the reports on a GPU, since they may be outdated."""
        reports, schedulers = dict(self.reports), dict(self.schedulers)
        reports.pop(gpu, None)
        schedulers.pop(gpu, None)
        return SmiMemory(reports, schedulers)

    def of_contexts(self, contexts: Mapping[PciAddress, SchedulerContext]) -> "SmiMemory":
        """Return the memory without the reports on schedulers of other contexts than these."""
        kept = {gpu: report for gpu, report in self.schedulers.items() if report.scheduler_context == contexts.get(gpu)}
        return self if kept == self.schedulers else replace(self, schedulers=kept)


WHOLE = frozenset({DesiredMode.PASSTHROUGH, *FOR_CONTAINERS})


class PlannedFrom(msgspec.Struct, frozen=True):
    """The inputs of a node's last plans, and the states of its GPUs, for the next plans."""

    inventory: Inventory
    smi: SmiMemory
    holdings: Mapping[PciAddress, tuple[Holding, ...]]
    found: Mapping[PciAddress, GpuState | None]
    """The states without nvidia-smi's reports."""
    states: Mapping[PciAddress, GpuState | None]
    again: frozenset[PciAddress] = frozenset()
    """The GPUs whose states, with nvidia-smi's reports, are those of the plans before."""
    config_gpus: list[ConfigGpu] = msgspec.field(default_factory=list)
    """The GPUs that the vGPU config has chosen from; none without a config."""

    def state_again(self, inventory: Inventory, gpu: PciAddress, holdings: tuple[Holding, ...]) -> GpuState | None:
        """Return the last state of a GPU if the same follows again, else None."""
        last, host, users = self.found.get(gpu), inventory.gpus[gpu].vgpu_host, inventory.facts.users
        if last is None or host is None or host.framework is Framework.SRIOV_VF:  # whose users depend on its VFs
            return None
        before = self.inventory.gpus[gpu]
        is_same = before.function is inventory.gpus[gpu].function and before.vgpu_host is host
        is_same = is_same and (self.inventory is inventory or users is self.inventory.facts.users)
        if not is_same or self.holdings.get(gpu, ()) != holdings:
            return None
        if self.inventory is not inventory and not has_live(last, inventory, host):
            return None
        return last

    def is_again(self, inventory: Inventory, gpu: PciAddress, found: GpuState | None, smi: SmiMemory) -> bool:
        """Return whether the state of a GPU, with nvidia-smi's report, is that of the last plan."""
        is_same = found is not None and found is self.found.get(gpu)
        is_same = is_same and inventory.facts.functions[gpu] is self.inventory.facts.functions[gpu]
        return is_same and smi.reports.get(gpu) is self.smi.reports.get(gpu)


def states_of(
    inventory: Inventory,
    gpus: Iterable[PciAddress],
    allocated: Iterable[Holding],
    smi: SmiMemory,
    last: PlannedFrom | None,
) -> PlannedFrom:
    """Return the states of GPUs with their inputs; `allocated` has all allocated vGPUs of the node."""
    functions, by_function = inventory.facts.functions, holdings_by_function(allocated)
    holdings = {gpu: holdings_on(functions[gpu], by_function) for gpu in gpus}
    found: dict[PciAddress, GpuState | None] = {}
    states: dict[PciAddress, GpuState | None] = {}
    unchanged: list[PciAddress] = []
    for gpu, of_gpu in holdings.items():
        again = last.state_again(inventory, gpu, of_gpu) if last is not None else None
        found[gpu] = again if again is not None else gpu_state_of(inventory, gpu, of_gpu, NAMESPACE)
        if last is not None and last.is_again(inventory, gpu, found[gpu], smi):
            states[gpu] = last.states[gpu]
            unchanged.append(gpu)
        else:
            states[gpu] = _with_report(functions[gpu], found[gpu], smi)
    return PlannedFrom(inventory, smi, holdings, found, states, frozenset(unchanged))


def _with_report(function: PciFunction, gpu_state: GpuState | None, smi: SmiMemory) -> GpuState | None:
    observed = smi.reports.get(function.address)
    return gpu_state if gpu_state is None or observed is None else with_report(gpu_state, function, observed[1])


class DesiredConfig(msgspec.Struct, frozen=True):
    """The vGPU config of a node."""

    config_set: ConfigSet | None = None
    """The vGPU configs, None if not observed yet."""
    name: ConfigName | None = None
    """The name of the desired vGPU config, None if there is none or it was not observed yet."""


class VgpuDemand(msgspec.Struct, frozen=True):
    """The inputs of a node's desired vGPUs and their plans, besides the host and nvidia-smi."""

    config: DesiredConfig
    modes: Modes
    drivers: DesiredDrivers
    holdings: tuple[Holding, ...]
    named: Mapping[str, Source]
    """The GPUs whose mode is set by address, with the source that names each."""
    sizes: Sizes | None = None
    """Whether vGPUs of several sizes may share a GPU in mode on-demand; None keeps the GPUs' setting."""


@dataclass(frozen=True, slots=True)
class NodeVgpus:
    """The desired vGPUs of one node, and the plans toward them."""

    config: DesiredConfig = field(default_factory=DesiredConfig)
    desired_types: DesiredTypes = field(default_factory=DesiredTypes)
    """The desired vGPU types by GPU, or why they are unknown."""
    invalid: tuple[InvalidDesired, ...] = ()
    """The desired vGPUs that their GPUs can't carry."""
    by_gpu: Mapping[PciAddress, tuple[DesiredVgpus, VgpuPlan]] = field(default_factory=dict)
    """The desired vGPUs of each GPU, and its plan."""
    desired: Mapping[PciAddress, DesiredGpu] = field(default_factory=dict)
    """The desired state of each GPU; gpuvirt does not change the other GPUs."""
    questions: Mapping[PciAddress, tuple[DesiredVgpus, Questions]] = field(default_factory=dict)
    """The questions for nvidia-smi. A GPU has no plan until the questions that block it are answered."""
    time_shared: Mapping[PciAddress, SchedulerContext] = field(default_factory=dict)
    """The GPUs with vGPUs that share time, with the contexts of their schedulers."""
    on_demand: Mapping[PciAddress, GpuState | None] = field(default_factory=dict)
    """The GPUs in mode on-demand with their states, None for one whose driver can't create vGPUs now."""
    planned_from: PlannedFrom | None = field(default=None, compare=False, repr=False)
    """The inputs and states that the next plans reuse for unchanged GPUs; without them, the plans are the same."""

    @property
    def undesired(self) -> frozenset[VgpuId]:
        """The vGPUs to remove, now or when they are free."""
        return frozenset[VgpuId]().union(*(plan.undesired for _, plan in self.by_gpu.values()))

    @property
    def configs(self) -> Mapping[PciAddress, str]:
        """The vGPU config that is applied to each GPU."""
        name = self.config.name
        desired = chain(self.by_gpu.items(), self.questions.items())
        of_config = (gpu for gpu, (vgpus, _) in desired if not (vgpus.whole or vgpus.on_demand))
        return dict.fromkeys(of_config, name.name if name is not None else "")

    def plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return the plan for the vGPUs of a GPU, an empty one if it has no desired vGPUs."""
        planned = self.by_gpu.get(gpu)
        return planned[1] if planned is not None else VgpuPlan(gpu)

    def waits_for_smi(self, gpu: PciAddress) -> bool:
        """Return whether a GPU has no plan until nvidia-smi has answered."""
        return gpu in self.questions and self.questions[gpu][1].blocks

    def waits_for_processes(self, inventory: Inventory | None, entries: Iterable[Entry]) -> bool:
        """Return whether a plan waits for a VM whose pod is gone."""
        if inventory is None or not any(plan.pending for _, plan in self.by_gpu.values()):
            return False
        users, pods = inventory.facts.users or {}, {entry.target.vgpu for entry in entries}
        groups = (vgpu.live.group for vgpu_id, vgpu in inventory.vgpus.items() if vgpu_id not in pods)
        return any(isinstance(group, int) and users.get(IommuGroup(group)) for group in groups)


def plan_node_vgpus(
    inventory: Inventory, demand: VgpuDemand, smi: SmiMemory, last: NodeVgpus | None = None
) -> NodeVgpus:
    """Return the desired vGPUs of each GPU, the plans toward them, and what nvidia-smi must be asked first.

    The plans of GPUs that have not changed since the `last` plans are taken from these.
    """
    modes = {gpu: demand.modes.of(gpu) for gpu in inventory.gpus}
    with_vgpus = dict.fromkeys(gpu for gpu, mode in modes.items() if mode is DesiredMode.VGPU)
    on_demand = [gpu for gpu, mode in modes.items() if mode is DesiredMode.ON_DEMAND]
    whole = [gpu for gpu, mode in modes.items() if mode in WHOLE]
    carriers, last = (*with_vgpus, *on_demand), last if last is not None else NodeVgpus()
    of_gpus = inventory.gpus if with_vgpus else (*whole, *on_demand)
    planned = states_of(inventory, of_gpus, demand.holdings, smi, last.planned_from)
    found, states = planned.found, planned.states
    desired_types, gpus = _resolved(inventory, demand.config, found if with_vgpus else {}, last)
    vgpus = dict.fromkeys(whole, DesiredVgpus(whole=True))
    vgpus |= dict.fromkeys(on_demand, DesiredVgpus(sizes=demand.sizes, on_demand=True))
    vgpus |= {gpu: target for gpu, target in desired_types.desired_by_gpu.items() if gpu in with_vgpus}
    desired = {
        gpu: DesiredGpu(demand.drivers.get(gpu), vgpus.get(gpu)) for gpu in sorted(demand.drivers.keys() | vgpus.keys())
    }
    planned_again = {gpu for gpu in planned.again & last.by_gpu.keys() if last.desired[gpu] == desired.get(gpu)}
    to_ask = [gpu for gpu in carriers if gpu not in planned_again or gpu in last.questions]
    asked = {gpu: (vgpus[gpu], question) for gpu, question in _questions(inventory, to_ask, vgpus, found, smi)}
    by_gpu = {
        gpu: last.by_gpu[gpu]
        if gpu in planned_again
        else (target, plan_vgpus(inventory.facts, gpu, states[gpu], desired[gpu]))
        for gpu, target in vgpus.items()
        if gpu not in asked or not asked[gpu][1].blocks
    }
    of_config = [gpu for gpu in gpus if gpu.address in with_vgpus]
    known = {gpu: last.time_shared.get(gpu) for gpu in planned_again}
    return NodeVgpus(
        demand.config,
        desired_types,
        tuple(_invalid(demand, desired_types, by_gpu, of_config)) if gpus else (),
        by_gpu,
        desired,
        asked,
        dict(_scheduler_contexts(inventory, carriers, states, known)),
        {gpu: states[gpu] for gpu in on_demand},
        replace(planned, config_gpus=gpus),
    )


def _resolved(
    inventory: Inventory, config: DesiredConfig, found: Mapping[PciAddress, GpuState | None], last: NodeVgpus
) -> tuple[DesiredTypes, list[ConfigGpu]]:
    """Return the desired vGPUs, and the GPUs in the form that configs choose from, none without a config."""
    if not found or config.config_set is None or config.name is None:
        return DesiredTypes(), []
    gpus = config_gpus(inventory, {gpu: state for gpu, state in found.items() if state is not None})
    is_same = config.config_set is last.config.config_set and config.name == last.config.name
    if is_same and last.planned_from is not None and last.planned_from.config_gpus == gpus:
        return last.desired_types, gpus
    return resolve(config.name, config.config_set, gpus), gpus


def _questions(
    inventory: Inventory,
    with_vgpus: Iterable[PciAddress],
    vgpus: Mapping[PciAddress, DesiredVgpus],
    found: Mapping[PciAddress, GpuState | None],
    smi: SmiMemory,
) -> Iterator[tuple[PciAddress, Questions]]:
    for gpu in with_vgpus:
        desired_vgpus, state = vgpus.get(gpu), found[gpu]
        if desired_vgpus is None or state is None or smi.reports.get(gpu, (None,))[0] == desired_vgpus:
            continue
        if (asked := questions(inventory.facts.functions[gpu], state, desired_vgpus)) is not None:
            yield gpu, asked


def _invalid(
    demand: VgpuDemand,
    desired_types: DesiredTypes,
    by_gpu: Mapping[PciAddress, tuple[DesiredVgpus, VgpuPlan]],
    carriers: Collection[ConfigGpu],
) -> Iterator[InvalidDesired]:
    name = demand.config.name
    if name is None or desired_types.problem is not None:
        return
    yield from invalidvgpus.without_vgpus(demand.named, name.name, desired_types.desired_by_gpu, carriers)
    for gpu in carriers:
        if gpu.address in by_gpu:
            yield from invalidvgpus.unknown_types(name.source, gpu, name.name, by_gpu[gpu.address][1].refusals)


def _scheduler_contexts(
    inventory: Inventory,
    with_vgpus: Iterable[PciAddress],
    states: Mapping[PciAddress, GpuState | None],
    known: Mapping[PciAddress, SchedulerContext | None],
) -> Iterator[tuple[PciAddress, SchedulerContext]]:
    """Yield the GPUs whose vGPUs share time, with the contexts of their schedulers; `known` are those of the last plans
    for GPUs that have not changed."""
    for gpu in with_vgpus:
        if gpu in known:
            scheduler_context = known[gpu]
        else:
            state, function = states[gpu], inventory.facts.functions[gpu]
            scheduler_context = scheduler_context_of(function, state) if state is not None else None
        if scheduler_context is not None:
            yield gpu, scheduler_context

"""What the agent knows of carving: which vGPUs are wanted, what nvidia-smi said, and the plans that follow.

Nothing here waits, or does anything to the host.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Scheduler, SmiReport
from gpuvirt.model import invalidvgpus
from gpuvirt.model.change.desired import DesiredDrivers, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.gpustate import (
    NAMESPACE,
    GpuState,
    Holding,
    gpu_state_of,
    with_report,
)
from gpuvirt.model.change.modes import Questions, questions
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.planner import plan_vgpus
from gpuvirt.model.change.scheduling import Footing, Told, footing_of
from gpuvirt.model.invalid import InvalidDesired, Source
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.ledger import Entry
from gpuvirt.model.vgpuwanted import Book, ConfigName, Wanted, config_gpus, resolve
from gpuvirt.model.vgpuwish import ConfigGpu
from gpuvirt.model.wanted import Modes, WantedMode

WHOLE = frozenset({WantedMode.PASSTHROUGH, WantedMode.CONTAINER})


class CarvePlans:
    """One node's."""

    def __init__(self) -> None:
        self.book: Book | None = None
        """The vGPU configs that there are, None where that was not heard yet."""
        self.config: ConfigName | None = None
        """The one that is wanted, None for none or where it was not heard yet."""
        self.wanted = Wanted()
        """Which vGPUs are wanted, or why that is not known."""
        self.invalid: tuple[InvalidDesired, ...] = ()
        """What of the wanted vGPUs can't be on the GPUs for which they are wanted."""
        self.by_gpu: dict[PciAddress, tuple[DesiredVgpus, VgpuPlan]] = {}
        """What is wanted of each GPU that is to be carved, and what is to be done to it."""
        self.desired: Mapping[PciAddress, DesiredGpu] = {}
        """What is desired of each GPU; one that is missing is left alone."""
        self.smi: dict[PciAddress, tuple[DesiredVgpus, SmiReport]] = {}
        """What nvidia-smi said of GPUs, and for which wish it was asked."""
        self.questions: Mapping[PciAddress, tuple[DesiredVgpus, Questions]] = {}
        """What it must be asked before more can be concluded."""
        self.time_shared: Mapping[PciAddress, Footing] = {}
        """The GPUs that are kept in mode vgpu and share their time, with what their schedulers stand on."""
        self.schedulers: dict[PciAddress, Told] = {}
        """What nvidia-smi told of those; forgotten once they stand otherwise."""

    @property
    def unwanted(self) -> frozenset[VgpuId]:
        """The vGPUs that are to go, now or when they are free."""
        return frozenset[VgpuId]().union(*(plan.unwanted for _, plan in self.by_gpu.values()))

    @property
    def configs(self) -> Mapping[PciAddress, str]:
        """The config by which each GPU is kept carved."""
        carved = (gpu for gpu, (wish, _) in self.by_gpu.items() if not wish.whole)
        return dict.fromkeys((*carved, *self.questions), self.config.name if self.config is not None else "")

    def hear_smi(self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, at_s: float) -> None:
        """Take what nvidia-smi said when it was asked for vGPUs."""
        footing = self.time_shared.get(gpu)
        self.smi[gpu] = vgpus, report
        if report.scheduler is not None and footing is not None:
            self.hear_scheduler(gpu, Told(report.scheduler, footing, at_s))

    def forget_smi(self, gpu: PciAddress) -> None:
        """Take that what nvidia-smi said of a GPU may be otherwise by now."""
        self.smi.pop(gpu, None)
        self.schedulers.pop(gpu, None)

    def hear_scheduler(self, gpu: PciAddress, told: Told) -> bool:
        """Take what nvidia-smi told of a GPU's scheduler, for its plan as well; return whether it is news."""
        before, said = self.schedulers.get(gpu), self.smi.get(gpu)
        self.schedulers[gpu] = told
        if said is not None and said[1].scheduler is not None and isinstance(told.scheduler, Scheduler):
            self.smi[gpu] = said[0], replace(said[1], scheduler=told.scheduler)
        return before is None or replace(before, at_s=told.at_s) != told

    def conclude(
        self,
        inventory: Inventory,
        holdings: tuple[Holding, ...],
        wanted: Modes,
        drivers: DesiredDrivers,
        named: Mapping[str, Source],
    ) -> None:
        """Conclude which vGPUs are wanted, and what is to be done so that they are there.

        `named` are the GPUs that somebody wants in a mode one by one, by address, with where each is named.
        """
        modes = {gpu: wanted.of(gpu) for gpu in inventory.gpus}
        carved = [gpu for gpu, mode in modes.items() if mode is WantedMode.VGPU]
        whole = [gpu for gpu, mode in modes.items() if mode in WHOLE]
        functions = inventory.facts.functions
        found = {
            gpu: gpu_state_of(inventory, gpu, holdings, NAMESPACE) for gpu in (inventory.gpus if carved else whole)
        }
        states = {gpu: self._with_report(functions[gpu], state) for gpu, state in found.items()}
        self.time_shared = dict(_footings(inventory, carved, states))
        gpus = self._resolve(inventory, found if carved else {})
        vgpus = dict.fromkeys(whole, DesiredVgpus(whole=True))
        vgpus |= {gpu: wish for gpu, wish in self.wanted.wishes.items() if gpu in carved}
        self.questions = {gpu: (vgpus[gpu], asked) for gpu, asked in self._questions(inventory, carved, vgpus, found)}
        managed = drivers.keys() | vgpus.keys()
        self.desired = {gpu: DesiredGpu(drivers.get(gpu), vgpus.get(gpu)) for gpu in sorted(managed)}
        self.by_gpu = {
            gpu: (wish, plan_vgpus(functions[gpu], states[gpu], self.desired[gpu]))
            for gpu, wish in vgpus.items()
            if gpu not in self.questions
        }
        self.invalid = tuple(self._invalid([gpu for gpu in gpus if gpu.address in carved], named)) if gpus else ()
        stands = self.time_shared
        self.schedulers = {gpu: told for gpu, told in self.schedulers.items() if told.footing == stands.get(gpu)}

    def _questions(
        self,
        inventory: Inventory,
        carved: Iterable[PciAddress],
        vgpus: Mapping[PciAddress, DesiredVgpus],
        found: Mapping[PciAddress, GpuState | None],
    ) -> Iterator[tuple[PciAddress, Questions]]:
        for gpu in carved:
            wish, state = vgpus.get(gpu), found[gpu]
            if wish is None or state is None or self.smi.get(gpu, (None,))[0] == wish:
                continue
            if (asked := questions(inventory.facts.functions[gpu], state, wish)) is not None:
                yield gpu, asked

    def waits_for_processes(self, inventory: Inventory | None, entries: Iterable[Entry]) -> bool:
        """Return whether a plan waits for a VM whose pod is gone."""
        if inventory is None or not any(plan.pending for _, plan in self.by_gpu.values()):
            return False
        users, pods = inventory.facts.users or {}, {entry.target.vgpu for entry in entries}
        groups = (vgpu.live.group for vgpu_id, vgpu in inventory.vgpus.items() if vgpu_id not in pods)
        return any(isinstance(group, int) and users.get(IommuGroup(group)) for group in groups)

    def plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return what is to be done to the vGPUs of a GPU: nothing where none are desired."""
        planned = self.by_gpu.get(gpu)
        return planned[1] if planned is not None else VgpuPlan(gpu)

    def _resolve(self, inventory: Inventory, found: Mapping[PciAddress, GpuState | None]) -> list[ConfigGpu]:
        """Find out which vGPUs are wanted; return the GPUs as configs pick them, none without a config."""
        if not found or self.book is None or self.config is None:
            self.wanted = Wanted()
            return []
        gpus = config_gpus(inventory, {gpu: state for gpu, state in found.items() if state is not None})
        self.wanted = resolve(self.config, self.book, gpus)
        return gpus

    def _invalid(self, carved: Collection[ConfigGpu], named: Mapping[str, Source]) -> Iterator[InvalidDesired]:
        if self.config is None or self.wanted.trouble is not None:
            return
        yield from invalidvgpus.without_vgpus(named, self.config.name, self.wanted.wishes, carved)
        for gpu in carved:
            if gpu.address in self.by_gpu:
                plan = self.by_gpu[gpu.address][1]
                yield from invalidvgpus.unknown_types(self.config.source, gpu, self.config.name, plan.refusals)

    def _with_report(self, function: PciFunction, board: GpuState | None) -> GpuState | None:
        said = self.smi.get(function.address)
        return board if board is None or said is None else with_report(board, function, said[1])


def _footings(
    inventory: Inventory, carved: Iterable[PciAddress], states: Mapping[PciAddress, GpuState | None]
) -> Iterator[tuple[PciAddress, Footing]]:
    """Yield the GPUs that share their time between vGPUs, with what their schedulers stand on."""
    for gpu in carved:
        state = states[gpu]
        footing = footing_of(inventory.facts.functions[gpu], state) if state is not None else None
        if footing is not None:
            yield gpu, footing

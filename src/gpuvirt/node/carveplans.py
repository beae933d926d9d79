"""What the agent knows of carving: which vGPUs are wanted, what nvidia-smi said, and the plans that follow.

Nothing here waits, or does anything to the host.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Framework, Scheduler, SmiReport
from gpuvirt.model import invalidvgpus
from gpuvirt.model.board import NAMESPACE, Board, Holding, board_of, with_report
from gpuvirt.model.carveplanning import plan_gpu
from gpuvirt.model.carving import CarvePlan, CarveWish
from gpuvirt.model.gpumodes import Questions, questions
from gpuvirt.model.invalid import InvalidDesired, Source
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.scheduling import Footing, Told, footing_of
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
        self.by_gpu: dict[PciAddress, tuple[CarveWish, CarvePlan]] = {}
        """What is wanted of each GPU that is to be carved, and what is to be done to it."""
        self.desired: Mapping[PciAddress, CarveWish] = {}
        """What is wanted of each GPU, whether there is anything to be done for it or not."""
        self.smi: dict[PciAddress, tuple[CarveWish, SmiReport]] = {}
        """What nvidia-smi said of GPUs, and for which wish it was asked."""
        self.questions: Mapping[PciAddress, tuple[CarveWish, Questions]] = {}
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

    def hear_scheduler(self, gpu: PciAddress, told: Told) -> bool:
        """Take what nvidia-smi told of a GPU's scheduler, for its plan as well; return whether it is news."""
        before, said = self.schedulers.get(gpu), self.smi.get(gpu)
        self.schedulers[gpu] = told
        if said is not None and said[1].scheduler is not None and isinstance(told.scheduler, Scheduler):
            self.smi[gpu] = said[0], replace(said[1], scheduler=told.scheduler)
        return before is None or replace(before, at_s=told.at_s) != told

    def conclude(
        self, inventory: Inventory, holdings: tuple[Holding, ...], wanted: Modes, named: Mapping[str, Source]
    ) -> None:
        """Conclude which vGPUs are wanted, and what is to be done so that they are there.

        `named` are the GPUs that somebody wants in a mode one by one, by address, with where each is named.
        """
        modes = {gpu: wanted.of(gpu) for gpu in inventory.gpus}
        carved = [gpu for gpu, mode in modes.items() if mode is WantedMode.VGPU]
        self.wanted, self.by_gpu, self.questions, self.time_shared, self.invalid = Wanted(), {}, {}, {}, ()
        self.desired = {gpu: CarveWish(whole=True) for gpu, mode in modes.items() if mode in WHOLE}
        if carved:
            gpus = self._plan(inventory, holdings, carved)
            self.invalid = tuple(self._invalid([gpu for gpu in gpus if gpu.address in carved], named))
        self.by_gpu |= _emptied(inventory, holdings, {gpu: mode for gpu, mode in modes.items() if mode in WHOLE})
        stands = self.time_shared
        self.schedulers = {gpu: told for gpu, told in self.schedulers.items() if told.footing == stands.get(gpu)}

    def _plan(self, inventory: Inventory, holdings: tuple[Holding, ...], carved: list[PciAddress]) -> list[ConfigGpu]:
        """Plan for all GPUs that are to be carved; return the GPUs as configs pick them, none without a config."""
        functions = inventory.facts.functions
        found = {gpu: board_of(inventory, gpu, holdings, NAMESPACE) for gpu in inventory.gpus}
        boards = {gpu: board for gpu, board in found.items() if board is not None}
        reported = {gpu: self._with_report(functions[gpu], found[gpu]) for gpu in carved}
        self.time_shared = {
            gpu: footing
            for gpu, board in reported.items()
            if board is not None and (footing := footing_of(functions[gpu], board)) is not None
        }
        if self.book is None or self.config is None:
            return []
        gpus = config_gpus(inventory, boards)
        self.wanted = resolve(self.config, self.book, gpus)
        wishes = {gpu: self.wanted.wishes[gpu] for gpu in carved if gpu in self.wanted.wishes}
        self.desired = {**self.desired, **wishes}
        self.questions = {
            gpu: (wish, asked)
            for gpu, wish in wishes.items()
            if gpu in boards and self.smi.get(gpu, (None,))[0] != wish
            if (asked := questions(functions[gpu], boards[gpu], wish)) is not None
        }
        self.by_gpu = {
            gpu: (wish, plan_gpu(functions[gpu], reported[gpu], wish))
            for gpu, wish in wishes.items()
            if gpu not in self.questions
        }
        return gpus

    def _invalid(self, carved: Collection[ConfigGpu], named: Mapping[str, Source]) -> Iterator[InvalidDesired]:
        if self.config is None or self.wanted.trouble is not None:
            return
        yield from invalidvgpus.without_vgpus(named, self.config.name, self.wanted.wishes, carved)
        for gpu in carved:
            if gpu.address in self.by_gpu:
                plan = self.by_gpu[gpu.address][1]
                yield from invalidvgpus.unknown_types(self.config.source, gpu, self.config.name, plan.refusals)

    def _with_report(self, function: PciFunction, board: Board | None) -> Board | None:
        said = self.smi.get(function.address)
        return board if board is None or said is None else with_report(board, function, said[1])


def _emptied(
    inventory: Inventory, holdings: tuple[Holding, ...], gpus: Mapping[PciAddress, WantedMode]
) -> dict[PciAddress, tuple[CarveWish, CarvePlan]]:
    """Return what is to be done to GPUs that are to be had whole, and carry something or have VFs."""
    wish, functions = CarveWish(whole=True), inventory.facts.functions
    boards = {gpu: board_of(inventory, gpu, holdings, NAMESPACE) for gpu in gpus if not functions[gpu].on_vfio}
    plans = {
        gpu: plan_gpu(functions[gpu], board, wish)
        for gpu, board in boards.items()
        if not (gpus[gpu] is WantedMode.CONTAINER and board is not None and _has_vfs_for_containers(board))
    }
    return {gpu: (wish, plan) for gpu, plan in plans.items() if not plan.met}


def _has_vfs_for_containers(board: Board) -> bool:
    """Return whether a GPU's VFs are functions that its native driver serves to containers, as AMD's and Intel's."""
    return board.host.framework is Framework.SRIOV_VF

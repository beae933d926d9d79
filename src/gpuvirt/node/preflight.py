"""Says what will stop a change of a GPU on its way, before its first step: what is known to fail costs no vGPU."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.tools import Program, ToolMissingError
from gpuvirt.model import shortfalls
from gpuvirt.model.board import Board
from gpuvirt.model.carving import (
    CarvePlan,
    CarveStep,
    CarveWish,
    CreateInstance,
    DestroyInstance,
    DisableVfs,
    RemoveVgpu,
    SetMigMode,
    SetMixedSizes,
    SetScheduler,
)
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.plan import Wish, Wishes
from gpuvirt.model.reasons import Reason
from gpuvirt.node import binder
from gpuvirt.node.binder import Site
from gpuvirt.node.carvesteps import claims, see_that_it_is_idle, see_that_vfs_can_go
from gpuvirt.node.leasing import RefusedError

NVIDIA_DRIVER = "nvidia"
"""The driver that lets only sriov-manage switch VFs: it has no `sriov_configure` (drivers/pci/iov.c: ENOENT)."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one GPU that is about to begin."""

    inventory: Inventory
    board: Board | None
    plan: CarvePlan
    wish: CarveWish
    moves: Wishes
    """With which drivers GPUs are wanted once they carry nothing."""

    @property
    def gpu(self) -> PciAddress:
        """The GPU."""
        return self.plan.gpu

    @property
    def steps(self) -> tuple[CarveStep, ...]:
        """The steps of the plan, and the one that will follow once the GPU carries nothing."""
        steps = self.plan.steps
        carries_on_vfs = self.board is not None and self.board.host.framework is not Framework.SRIOV_VF
        if not self.wish.whole or not carries_on_vfs or not self.inventory.facts.functions[self.gpu].virtfns:
            return steps
        return *steps, DisableVfs(self.gpu)


def obstacles(site: Site, change: Change) -> tuple[Reason, ...]:
    """Return why a change can't be finished, as far as that is known now; nothing where it takes nothing away.

    What passes when its user ends is no obstacle to what can be done meanwhile.
    """
    if not any(isinstance(step, RemoveVgpu | DestroyInstance) for step in change.plan.steps):
        return ()
    try:
        return tuple(dict.fromkeys(_obstacles(site, change)))
    except RefusedError as error:
        return (error.reason,)


def _obstacles(site: Site, change: Change) -> Iterator[Reason]:
    for step in change.steps:
        match step:
            case DisableVfs(gpu):
                if _needs_sriov_manage(change.inventory, gpu):
                    yield from _missing(site, change.gpu, Program.SRIOV_MANAGE, step)
                if not change.plan.pending:
                    see_that_vfs_can_go(site.kernel, change.inventory, gpu)
            case SetMigMode(gpu):
                yield from _missing(site, change.gpu, Program.NVIDIA_SMI, step)
                see_that_it_is_idle(site.kernel, gpu)
            case SetMixedSizes() | DestroyInstance() | CreateInstance() | SetScheduler():
                yield from _missing(site, change.gpu, Program.NVIDIA_SMI, step)
            case RemoveVgpu(vgpu) if change.board is not None:
                live = next(one for one in change.board.host.live if one.id == vgpu)
                tuple(claims(site.kernel, change.inventory, change.board.host, live))
            case _:
                pass
    if change.wish.whole and change.moves.get(change.gpu) is Wish.PASSTHROUGH:
        yield from binder.obstacles(site, change.inventory.gpus[change.gpu].unit, change.moves)


def _needs_sriov_manage(inventory: Inventory, gpu: PciAddress) -> bool:
    function = inventory.facts.functions[gpu]
    return function.id.vendor == NVIDIA and function.driver == NVIDIA_DRIVER


def _missing(site: Site, gpu: PciAddress, program: Program, step: CarveStep) -> Iterator[Reason]:
    try:
        site.tools.demand(program)
    except ToolMissingError as error:
        yield shortfalls.program_missing(gpu, program, step.text, error.said or str(error))

"""The host that a `gpuvirt vgpu` command is about, and carving its GPUs, each in a lane that can be left behind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from gpuvirt.cli import vfio
from gpuvirt.cli.inlane import in_lane
from gpuvirt.cli.vgpurender import Result
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model import refusals
from gpuvirt.model.board import Board
from gpuvirt.model.carving import CarvePlan, CarveStep, CarveWish
from gpuvirt.model.plan import RollBack
from gpuvirt.model.reasons import Reason
from gpuvirt.node import carver, onelook
from gpuvirt.node.binder import Site
from gpuvirt.node.carver import Given, Look
from gpuvirt.node.carvesteps import Tell
from gpuvirt.paths import HostRoots

CARVE_TIMEOUT_S = 180.0
"""sriov-manage takes some seconds a GPU, and tries again where somebody looks at the GPU meanwhile."""


@dataclass(frozen=True, slots=True)
class Host:
    """The host, and what is known of it besides what it shows."""

    site: Site
    given: Given
    carved: Mapping[PciAddress, str]
    """The vGPU configs by which the agent keeps GPUs carved."""


def host(host_root: Path, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> Host:
    """Return the host that is meant, with who tells what pods have of it."""
    account = vfio.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    here = vfio.host(account)
    names = onelook.read_ledger(*account.ledgers).type_names
    return Host(here.site, Given(type_names=names, renew=account.given), here.carved)


def boards(seen: Look) -> Mapping[PciAddress, Board]:
    """Return the GPUs of a host that make vGPUs now."""
    found = {gpu: seen.board(gpu) for gpu in sorted(seen.inventory.gpus)}
    return {gpu: board for gpu, board in found.items() if board is not None}


def gpus_named(seen: Look, addresses: Iterable[str]) -> list[PciAddress]:
    """Return the GPUs that are meant; raise BadParameter for what is none."""
    found = list(vfio.parsed(addresses))
    for address in found:
        if address not in seen.inventory.gpus:
            raise typer.BadParameter(f"{address} is no GPU of this host (gpuvirt devices)")
    return found


def would(seen: Look, gpu: PciAddress, wish: CarveWish) -> Result:
    """Return what would be done to a GPU."""
    return _planned(carver.plan(seen, gpu, wish), dict(wish.types))


def carved(here: Host, seen: Look, gpu: PciAddress, wish: CarveWish, *, quiet: bool) -> Result:
    """Have a GPU carry what is wished, and return how that went; `seen` tells its unit."""

    def act(tell: Tell) -> tuple[Reason, ...]:
        return carver.carve(here.site, gpu, wish, here.given, tell, seen.inventory)

    return _managed(here, gpu, dict(wish.types)) or _acted(gpu, act, dict(wish.types), quiet=quiet)


def removed(here: Host, seen: Look, gpu: PciAddress, vgpu: VgpuId, *, quiet: bool, dry_run: bool) -> Result:
    """Remove one vGPU, and return how that went, or would; `seen` tells the GPU's unit."""
    if (managed := _managed(here, gpu)) is not None:
        return managed
    if dry_run:
        return _planned(carver.plan_removal(seen, gpu, vgpu))

    def act(tell: Tell) -> tuple[Reason, ...]:
        return carver.remove(here.site, gpu, vgpu, here.given, tell, seen.inventory)

    return _acted(gpu, act, quiet=quiet)


def _managed(here: Host, gpu: PciAddress, wished: dict[str, int] | None = None) -> Result | None:
    """Return why a GPU is left to the agent, None where it is not."""
    config = here.carved.get(gpu)
    return None if config is None else Result(gpu, (), (refusals.carved(gpu, config),), wished)


def _planned(plan: CarvePlan, wished: dict[str, int] | None = None) -> Result:
    return Result(plan.gpu, tuple(step.text for step in plan.steps), (*plan.refusals, *plan.pending), wished)


def _acted(
    gpu: PciAddress,
    act: Callable[[Tell], tuple[Reason, ...]],
    wished: dict[str, int] | None = None,
    *,
    quiet: bool,
) -> Result:
    taken: list[str] = []

    def tell(step: CarveStep | RollBack) -> None:
        taken.append(step.text)
        if not quiet:
            print(step.text, flush=True)

    reasons = in_lane(gpu, lambda: act(tell), taken, timeout_s=CARVE_TIMEOUT_S)
    return Result(gpu, tuple(taken), reasons, wished)

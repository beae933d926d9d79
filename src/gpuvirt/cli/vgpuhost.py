"""The host that a `gpuvirt vgpu` command is about, and carving its GPUs, each in a lane that can be left behind."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from gpuvirt.cli import options, vfio
from gpuvirt.cli.vgpurender import Result
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model import refusals
from gpuvirt.model.board import Board, holdings_of
from gpuvirt.model.carving import CarvePlan, CarveStep, CarveWish
from gpuvirt.model.reasons import Reason
from gpuvirt.node import carver, onelook
from gpuvirt.node.binder import Site
from gpuvirt.node.carver import Given, Look
from gpuvirt.node.guard import UnitBusyError
from gpuvirt.node.lane import LaneBlockedError, ThreadLane
from gpuvirt.paths import HostRoots, KubeletPaths

CARVE_TIMEOUT_S = 180.0
"""sriov-manage takes some seconds a GPU, and tries again where somebody looks at the GPU meanwhile."""


@dataclass(frozen=True, slots=True)
class Host:
    """The host, and what is known of it besides what it shows."""

    site: Site
    given: Given
    carved: Mapping[PciAddress, str]
    """The vGPU configs by which the agent keeps GPUs carved."""


def host(host_root: Path, kubelet_dir: Path | None) -> Host:
    """Return the host that is meant, with what is known of its pods."""
    here = vfio.host(host_root, kubelet_dir)
    roots = HostRoots.under(host_root)
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    ledger = onelook.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    same_boot = ledger.boot_id == onelook.boot_id(here.site.kernel)
    holdings = holdings_of(ledger.entries, same_boot=same_boot)
    return Host(here.site, Given(holdings, ledger.type_names), here.carved)


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
    plan = carver.plan(seen, gpu, wish)
    return Result(gpu, tuple(step.text for step in plan.steps), _reasons(plan), dict(wish.types))


def carved(here: Host, seen: Look, gpu: PciAddress, wish: CarveWish, *, quiet: bool) -> Result:
    """Have a GPU carry what is wished, and return how that went; `seen` tells its unit."""
    if (config := here.carved.get(gpu)) is not None:
        return Result(gpu, (), (refusals.carved(gpu, config),), dict(wish.types))
    taken: list[str] = []

    def tell(step: CarveStep) -> None:
        taken.append(step.text)
        if not quiet:
            print(step.text, flush=True)

    first = seen.inventory
    reasons = in_lane(gpu, lambda: carver.carve(here.site, gpu, wish, here.given, tell, first), taken)
    return Result(gpu, tuple(taken), reasons, dict(wish.types))


def removed(here: Host, gpu: PciAddress, vgpu: VgpuId, *, quiet: bool, dry_run: bool) -> Result:
    """Remove one vGPU, and return how that went, or would."""
    if (config := here.carved.get(gpu)) is not None:
        return Result(gpu, (), (refusals.carved(gpu, config),))
    taken: list[str] = []

    def tell(step: CarveStep) -> None:
        taken.append(step.text)
        if not quiet:
            print(step.text, flush=True)

    if dry_run:
        plan = carver.plan_removal(carver.look(here.site, here.given), gpu, vgpu)
        return Result(gpu, tuple(step.text for step in plan.steps), _reasons(plan))
    reasons = in_lane(gpu, lambda: carver.remove(here.site, gpu, vgpu, here.given, tell), taken)
    return Result(gpu, tuple(taken), reasons)


def in_lane(gpu: PciAddress, job: Callable[[], tuple[Reason, ...]], taken: Sequence[str]) -> tuple[Reason, ...]:
    """Do something to a GPU in a lane, which is left behind where the kernel puts it to sleep."""
    try:
        return asyncio.run(ThreadLane(gpu).run(job, name="carve", timeout_s=CARVE_TIMEOUT_S))
    except LaneBlockedError:
        return (refusals.blocked(gpu, taken[-1] if taken else "the lease"),)
    except UnitBusyError as error:
        return (refusals.busy(gpu, str(error)),)


def _reasons(plan: CarvePlan) -> tuple[Reason, ...]:
    return (*plan.refusals, *plan.pending)

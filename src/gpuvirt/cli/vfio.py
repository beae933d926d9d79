"""`gpuvirt vfio`: which GPUs are with virtual machines' driver, and moving them there and back by hand."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from gpuvirt.cli import options, vfiohost, vfiorender
from gpuvirt.cli.inworker import changed_in_worker
from gpuvirt.cli.options import Output
from gpuvirt.cli.vfiohost import Host
from gpuvirt.cli.vfiorender import Result
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.change.driverplanning import plan_units
from gpuvirt.model.change.drivers import driver_of
from gpuvirt.model.change.plan import Plan
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.steps import Unbind
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import refusals
from gpuvirt.node.change.observation import observe
from gpuvirt.paths import HostRoots

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Give GPUs to virtual machines' driver, and back; nothing that a machine has is ever touched.",
)

Addresses = Annotated[list[str] | None, typer.Argument(metavar="ADDRESS...", help="PCI addresses: 0000:65:00.0")]
Every = Annotated[bool, typer.Option("--all", "-a", help="All GPUs of this host.")]
Switches = Annotated[bool, typer.Option("--nvswitches", envvar="BIND_NVSWITCHES", help="NVSwitches, too, with --all.")]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="ADDRESS", help="A function of another slot that may move with a GPU of its group."),
]
RemoveVgpus = Annotated[
    bool,
    typer.Option("--remove-vgpus", help="First remove the GPU's vGPUs, which nobody may use, and switch its VFs off."),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Take a GPU from processes of the host, after a question; never from a pod or a machine."
    ),
]


@app.command("status")
def status(
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show for each GPU which driver has it, and whether it could go to virtual machines now."""
    here = vfiohost.host(vfiohost.account(HostRoots.under(host_root), kubelet_dir))
    seen = observe(here.site, here.inputs).host_state()
    # Each alone: what GPUs of one group say about each other is just what is asked.
    rows = [(gpu, plan_units(seen, {gpu: DesiredDriver.PASSTHROUGH})[0]) for gpu in sorted(seen.inventory.gpus)]
    vfiorender.status(seen, rows, as_json=output is Output.JSON)


@app.command("bind")
def bind(  # noqa: PLR0913  a command's options
    addresses: Addresses = None,
    *,
    every: Every = False,
    nvswitches: Switches = False,
    also: Also = None,
    remove_vgpus: RemoveVgpus = False,
    dry_run: options.DryRun = False,
    force: Force = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Give GPUs, with all functions of their slots, to the VFIO driver that knows them best.

    The driver that each function had is recorded, and `unbind` gives it back.
    """
    known = vfiohost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    here = vfiohost.host(known, also=also or (), force=force)
    desired = DesiredGpu(DesiredDriver.PASSTHROUGH, DesiredVgpus(whole=True) if remove_vgpus else None)
    change(here, desired, Chosen(addresses or (), every, nvswitches), output, dry_run=dry_run)


@app.command("unbind")
def unbind(  # noqa: PLR0913  a command's options
    addresses: Addresses = None,
    *,
    every: Every = False,
    nvswitches: Switches = False,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Give GPUs back to the drivers that they came from; one that a pod or a virtual machine has stays."""
    here = vfiohost.host(
        vfiohost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    )
    desired = DesiredGpu(DesiredDriver.NATIVE)
    change(here, desired, Chosen(addresses or (), every, nvswitches), output, dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the command line names."""

    addresses: Sequence[str]
    every: bool
    nvswitches: bool
    vendor: int | None = None
    """Whose devices `every` means; None: all vendors' that make GPUs for machines."""


def _heads(inventory: Inventory, chosen: Chosen) -> list[PciAddress]:
    """Return the GPUs and NVSwitches that are meant; raise BadParameter for what is none."""
    if chosen.every == bool(chosen.addresses):
        raise typer.BadParameter("give either addresses or --all")
    functions, gpus = inventory.facts.functions, inventory.gpus
    if chosen.every:
        switches = [one for one, function in functions.items() if function.kind is FunctionKind.NVSWITCH]
        heads = [*gpus, *(switches if chosen.nvswitches else ())]
        return [one for one in heads if chosen.vendor in {None, functions[one].id.vendor}]
    found = list(vfiohost.parsed(chosen.addresses))
    for address in found:
        if address not in functions:
            raise typer.BadParameter(f"{address}: there is no such function on this host (gpuvirt vfio status)")
        if address not in gpus and functions[address].kind is not FunctionKind.NVSWITCH:
            head = next((gpu for gpu in gpus if slot_of(gpu) == slot_of(address)), None)
            hint = f"it goes with its GPU, {head}" if head else "only GPUs and NVSwitches are moved"
            raise typer.BadParameter(f"{address} is no GPU; {hint}")
    return found


def change(host: Host, desired: DesiredGpu, chosen: Chosen, output: Output, *, dry_run: bool) -> None:
    """Bring what is chosen to what is desired, and say how that went; end with 1 where it failed."""
    seen = observe(host.site, host.inputs)
    heads = _heads(seen.inventory, chosen)
    emptied = {head: desired.vgpus for head in heads if desired.vgpus is not None and head in seen.inventory.gpus}
    state = seen.host_state(emptied)
    units = {
        unit: {one: replace(desired, vgpus=emptied.get(one)) for one in members if one in heads}
        for unit, members in sorted(seen.inventory.units.items())
        if not set(heads).isdisjoint(members)
    }
    plans = {unit: plan_unit(state, unit, target) for unit, target in units.items()}
    if host.inputs.forced and not dry_run:
        _ask(plans.values())
    results: list[Result] = []
    for unit, plan in plans.items():
        would = _would(host, plan, units[unit])
        quiet = output is Output.JSON
        left = dry_run or would.reasons
        results.append(would if left else _changed(host, units[unit], would, seen.inventory, quiet=quiet))
    vfiorender.results(results, desired, as_json=output is Output.JSON, dry_run=dry_run)
    if any(result.reasons for result in results):
        raise typer.Exit(1)


def _would(host: Host, plan: Plan, desired: DesiredUnit) -> Result:
    """Return what a plan says of itself, and what the agent would say of it."""
    kept = {gpu: host.managed[gpu] for gpu in desired if gpu in host.managed}
    managed = [refusals.managed(gpu, mode) for gpu, mode in kept.items() if driver_of(mode) is not desired[gpu].driver]
    reasons = (*managed, *plan.reasons)
    steps = () if reasons else tuple(step.text for step in plan.steps)
    return Result(plan.unit, tuple(desired), steps, reasons, plan.drivers.notes)


def _ask(plans: Iterable[Plan]) -> None:
    """Have a person say yes to what may end the work of processes."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("--force asks a question, and standard input is no terminal to answer it")
    gpus = ", ".join(step.address for plan in plans for step in plan.steps if isinstance(step, Unbind))
    if gpus:
        typer.confirm(f"Take {gpus} from the host's drivers, whoever uses it?", abort=True)


def _changed(host: Host, desired: DesiredUnit, would: Result, seen: Inventory, *, quiet: bool) -> Result:
    """Change one unit in a lane, which is left behind where the kernel puts it to sleep."""
    intent = next(iter(would.steps), None)
    taken, outcome = changed_in_worker(host.change_site, UnitId(would.unit), desired, seen, intent, quiet=quiet)
    return replace(would, steps=taken, reasons=outcome.reasons)

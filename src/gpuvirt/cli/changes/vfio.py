"""`gpuvirt vfio`: lists the drivers of GPUs, and binds GPUs to a VFIO driver and back."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.unitchange import hindrances, unseen_users, with_unseen_users
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.changes.commandhost import Host, changed_in_worker
from gpuvirt.cli.formats import ListFormat, ListOutput, Output
from gpuvirt.cli.output import changesrender
from gpuvirt.cli.output.changesrender import VfioResult
from gpuvirt.cli.parameters import options
from gpuvirt.diagnosis.checks.drivers import why_not_loadable
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import NOUVEAU, FunctionKind, PciFunction
from gpuvirt.hardware.host.platform import read_kernel
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.change.driverplanning import plan_units
from gpuvirt.model.change.nativedrivers import FALLBACK, is_head
from gpuvirt.model.change.plan import DriverPlan, Plan
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.steps import LoadModule, Unbind
from gpuvirt.model.devices.candidates import why_native
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import HostRoots

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Bind GPUs to a VFIO driver for VMs, or back to the host's.\n\n"
    "No command changes a GPU that a VM uses or that is allocated to a pod.",
)

Addresses = Annotated[list[str] | None, typer.Argument(metavar="ADDRESS...", help="PCI addresses: 0000:65:00.0")]
Every = Annotated[bool, typer.Option("--all", "-a", help="All GPUs of this host.")]
Switches = Annotated[bool, typer.Option("--nvswitches", envvar="BIND_NVSWITCHES", help="With --all, also NVSwitches.")]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="ADDRESS",
        help="A function of another slot that shares the GPU's IOMMU group and may be bound with it. Repeatable.",
    ),
]
RemoveVgpus = Annotated[
    bool,
    typer.Option("--remove-vgpus", help="First remove the GPU's vGPUs if all are unused, and switch its VFs off."),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="After a confirmation, unbind a GPU that processes of the host use, or bind a Grace GPU without the driver"
        " for its memory; never a GPU of a pod or VM.",
    ),
]


WithoutReset = Annotated[
    bool,
    typer.Option(
        "--without-reset",
        help="Also return a GPU that a VM has used and that the kernel can't reset. The VM's data is still in the"
        " GPU's memory.",
    ),
]


@app.command("status")
def status(
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Show each GPU's driver, and whether it can be bound for VMs."""
    here = commandhost.host(commandhost.account(HostRoots.under(host_root), kubelet_dir))
    seen = observe(here.change_host, here.inputs).host_state()
    # Each GPU is planned alone, so that its row has the refusals that other GPUs of its IOMMU group cause.
    functions = seen.inventory.facts.functions
    parts = (address for address, function in functions.items() if function.is_gpu_part)
    listed = sorted((*seen.inventory.gpus, *parts))
    rows = [(address, plan_units(seen, {address: DesiredDriver.PASSTHROUGH})[0]) for address in listed]
    missing = _why_not_loadable(here, [plan for _, plan in rows])
    unfit = {
        address: (
            *here.unfit.get(address, ()),
            *(missing if _loads_vfio_pci(plan) else ()),
            *_may_hang(seen.inventory, [address]),
        )
        for address, plan in rows
    }
    changesrender.vfio_status(seen, rows, unfit, ListFormat(output, no_headers))


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
    """Bind GPUs, with all functions of their slots, or VFs of AMD's and Intel's GPUs to a VFIO driver.

    The driver is vfio-pci, or the kernel's variant driver for the device. gpuvirt records the
    original driver of each function, and `unbind` restores it.
    """
    known = commandhost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    here = commandhost.host(known, also=also or (), force=force)
    desired = DesiredGpu(DesiredDriver.PASSTHROUGH, DesiredVgpus(whole=True) if remove_vgpus else None)
    change(here, desired, Chosen(addresses or (), every, nvswitches), output, dry_run=dry_run)


@app.command("unbind")
def unbind(  # noqa: PLR0913  a command's options
    addresses: Addresses = None,
    *,
    every: Every = False,
    nvswitches: Switches = False,
    dry_run: options.DryRun = False,
    without_reset: WithoutReset = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Bind GPUs back to their original drivers.

    A GPU that a VM uses, or that is allocated to a pod, stays on its VFIO driver.
    """
    known = commandhost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    here = commandhost.host(known, require_reset=not without_reset)
    desired = DesiredGpu(DesiredDriver.NATIVE)
    change(here, desired, Chosen(addresses or (), every, nvswitches), output, dry_run=dry_run)


def _may_hang(inventory: Inventory, heads: Iterable[PciAddress]) -> Iterator[Reason]:
    """Yield why an unbind of GPUs may hang, as `gpuvirt devices` says it."""
    functions = (inventory.facts.functions[head] for head in heads)
    yield from (why_native(inventory, function) for function in functions if function.driver == NOUVEAU)


class Chosen(msgspec.Struct, frozen=True):
    """The GPUs, their VFs and NVSwitches that the command line names."""

    addresses: Sequence[str]
    every: bool
    nvswitches: bool
    vendor: int | None = None
    """The vendor of the devices that `every` means; None for all supported vendors."""


def _heads(inventory: Inventory, chosen: Chosen) -> list[PciAddress]:
    """Return the GPUs, VFs and NVSwitches that the command line names; raise BadParameter for any other address."""
    if chosen.every == bool(chosen.addresses):
        raise typer.BadParameter("give either addresses or --all")
    functions, gpus = inventory.facts.functions, inventory.gpus
    if chosen.every:
        switches = [address for address, function in functions.items() if function.kind is FunctionKind.NVSWITCH]
        heads = [*gpus, *(switches if chosen.nvswitches else ())]
        return [head for head in heads if chosen.vendor in {None, functions[head].id.vendor}]
    found = list(commandhost.parsed(chosen.addresses))
    for address in found:
        if address not in functions:
            raise typer.BadParameter(f"{address}: this host has no such function (gpuvirt vfio status)")
        if not is_head(functions[address]):
            raise typer.BadParameter(f"{address} is no GPU; {_why_no_head(inventory, functions[address])}")
    return found


def _why_no_head(inventory: Inventory, function: PciFunction) -> str:
    """Return why a function has no driver of its own choice."""
    if function.is_nvidias_vf:
        return (
            f"it is a VF of {function.physfn}, which stays on its driver and carries a vGPU: gpuvirt vgpu create"
            f" {function.physfn} TYPE"
        )
    head = next((gpu for gpu in inventory.gpus if slot_of(gpu) == slot_of(function.address)), None)
    return f"it is bound together with its GPU, {head}" if head else "only GPUs, their VFs and NVSwitches can be bound"


def change(host: Host, desired: DesiredGpu, chosen: Chosen, output: Output, *, dry_run: bool) -> None:
    """Change the chosen GPUs to their desired state, and print the results; exit with 1 if a change failed."""
    seen = observe(host.change_host, host.inputs)
    heads = _heads(seen.inventory, chosen)
    emptied = {head: desired.vgpus for head in heads if desired.vgpus is not None and head in seen.inventory.gpus}
    units = {
        unit: {gpu: replace(desired, vgpus=emptied.get(gpu)) for gpu in members if gpu in heads}
        for unit, members in sorted(seen.inventory.units.items())
        if not set(heads).isdisjoint(members)
    }
    state = seen.host_state(emptied)
    plans = {unit: plan_unit(state, unit, target) for unit, target in units.items()}
    for phase in chain.from_iterable(plan.emptied for plan in plans.values()):
        seen = with_unseen_users(seen, phase)
    if seen.learned:
        state = seen.host_state(emptied)
        plans = {unit: plan_unit(state, unit, target) for unit, target in units.items()}
    for reason in _may_hang(seen.inventory, heads if desired.driver is DesiredDriver.PASSTHROUGH else ()):
        typer.echo(f"gpuvirt: {reason.text}", err=True)
    if host.inputs.forced and not dry_run:
        _ask(plans.values())
    missing = _why_not_loadable(host, [plan.drivers for plan in plans.values()])
    results: list[VfioResult] = []
    for unit, plan in plans.items():
        hindered = (*chain.from_iterable(hindrances(seen, state, plan).values()), *unseen_users(seen, plan.drivers))
        would = _would(host, plan, units[unit], hindered or (missing if _loads_vfio_pci(plan.drivers) else ()))
        quiet = output is not Output.TABLE
        if not dry_run and not would.reasons:
            would = _changed(host, units[unit], would, seen.inventory, quiet=quiet)
        elif not would.reasons:
            would = replace(would, reasons=plan.drivers.left_driverless)
        results.append(would)
    changesrender.vfio_results(results, desired, output=output, dry_run=dry_run)
    if any(result.reasons for result in results):
        raise typer.Exit(1)


def _loads_vfio_pci(plan: DriverPlan) -> bool:
    return any(isinstance(step, LoadModule) and step.driver == FALLBACK for step in plan.steps)


def _why_not_loadable(host: Host, plans: Iterable[DriverPlan]) -> tuple[Reason, ...]:
    """Return why plans that load vfio-pci certainly fail, as doctor says it."""
    if not any(map(_loads_vfio_pci, plans)):
        return ()
    return tuple(why_not_loadable(read_kernel(host.change_host.kernel)))


def _would(host: Host, plan: Plan, desired: DesiredUnit, against: Sequence[Reason]) -> VfioResult:
    """Return the result that a plan expects, with the refusals of an agent that keeps a GPU in another mode.

    `against`: why its steps would fail.
    """
    managed = filter(None, (host.why_kept(gpu, target.driver) for gpu, target in desired.items()))
    idle = [gpu for gpu, target in desired.items() if target.driver is DesiredDriver.PASSTHROUGH and not plan.steps]
    # A GPU that is bound already, and that no VM could use, is not reported as done.
    unfit = [reason for gpu in idle for reason in host.unfit.get(gpu, ())]
    reasons = tuple(dict.fromkeys((*managed, *plan.reasons, *unfit, *against)))
    steps = () if reasons else tuple(step.text for step in plan.steps)
    return VfioResult(plan.unit, tuple(desired), steps, reasons)


def _ask(plans: Iterable[Plan]) -> None:
    """Ask the user to confirm an unbind that may break processes of the host."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("--force asks for a confirmation, but standard input is not a terminal")
    gpus = ", ".join(step.address for plan in plans for step in plan.steps if isinstance(step, Unbind))
    if gpus:
        typer.confirm(f"Unbind {gpus} from the host's drivers, even if processes use it?", abort=True)


def _changed(host: Host, desired: DesiredUnit, would: VfioResult, seen: Inventory, *, quiet: bool) -> VfioResult:
    """Change one isolation unit, and return the result."""
    intent = next(iter(would.steps), None)
    taken, outcome = changed_in_worker(host.command_host, UnitId(would.unit), desired, seen, intent, quiet=quiet)
    return replace(would, steps=taken, reasons=outcome.reasons)

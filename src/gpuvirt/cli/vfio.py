"""`gpuvirt vfio`: which GPUs are with virtual machines' driver, and moving them there and back by hand."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuvirt.cli import options
from gpuvirt.cli.options import Output
from gpuvirt.paths import HostRoots, KubeletPaths

if TYPE_CHECKING:
    from gpuvirt.cli.inlane import Ground
    from gpuvirt.cli.podaccount import PodAccount
    from gpuvirt.cli.vfiorender import Result
    from gpuvirt.facts.ids import PciAddress
    from gpuvirt.model.change.desired import DesiredGpu, DesiredUnit
    from gpuvirt.model.change.plan import Plan
    from gpuvirt.model.inventory import Inventory
    from gpuvirt.model.view import NodeView
    from gpuvirt.node.change.inputs import Inputs
    from gpuvirt.node.change.site import Site

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Give GPUs to virtual machines' driver, and back; nothing that a machine has is ever touched.",
)

STEP_TIMEOUT_S = 60.0
"""A unit's steps take about a second; NVIDIA's driver may take half a minute to let a GPU go."""

Addresses = Annotated[list[str] | None, typer.Argument(metavar="ADDRESS...", help="PCI addresses: 0000:65:00.0")]
Every = Annotated[bool, typer.Option("--all", "-a", help="All GPUs of this host.")]
Switches = Annotated[bool, typer.Option("--nvswitches", envvar="BIND_NVSWITCHES", help="NVSwitches, too, with --all.")]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="ADDRESS", help="A function of another slot that may move with a GPU of its group."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the steps, and take none.")]
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


@dataclass(frozen=True, slots=True)
class Host:
    """The host that a command is about."""

    site: "Site"
    inputs: "Inputs"
    managed: "Mapping[PciAddress, str]"
    """The modes that the agent keeps GPUs in."""
    carved: "Mapping[PciAddress, str]"
    """The vGPU configs by which the agent keeps GPUs carved."""
    agent_folder: Path
    """The folder that an agent of this host locks."""

    @property
    def ground(self) -> "Ground":
        """Where devices are changed."""
        from gpuvirt.cli.inlane import Ground

        return Ground(self.site, self.inputs, self.agent_folder)


@app.command("status")
def status(
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show for each GPU which driver has it, and whether it could go to virtual machines now."""
    from gpuvirt.cli import vfiorender
    from gpuvirt.model.change.desired import DesiredDriver
    from gpuvirt.model.change.driverplanning import plan_units
    from gpuvirt.node.change.observation import observe

    here = host(account(HostRoots.under(host_root), kubelet_dir))
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
    dry_run: DryRun = False,
    force: Force = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Give GPUs, with all functions of their slots, to the VFIO driver that knows them best.

    The driver that each function had is recorded, and `unbind` gives it back.
    """
    from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus

    known = account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    here = host(known, also=also or (), force=force)
    desired = DesiredGpu(DesiredDriver.PASSTHROUGH, DesiredVgpus(whole=True) if remove_vgpus else None)
    change(here, desired, Chosen(addresses or (), every, nvswitches), output, dry_run=dry_run)


@app.command("unbind")
def unbind(  # noqa: PLR0913  a command's options
    addresses: Addresses = None,
    *,
    every: Every = False,
    nvswitches: Switches = False,
    dry_run: DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Give GPUs back to the drivers that they came from; one that a pod or a virtual machine has stays."""
    from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu

    here = host(account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated))
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


def account(roots: HostRoots, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> "PodAccount":
    """Return who tells what pods have of the host that is meant."""
    from gpuvirt.cli.podaccount import PodAccount
    from gpuvirt.hardware.kernel import RealKernel

    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    ledgers = (roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return PodAccount(RealKernel(roots), roots, kubelet, ledgers, assume_unallocated)


def host(account: "PodAccount", *, also: Iterable[str] = (), force: bool = False) -> Host:
    """Return the host that is meant, with what its agent keeps."""
    from gpuvirt.node import onelook
    from gpuvirt.node.change.inputs import Inputs
    from gpuvirt.node.change.site import site_of

    site = site_of(account.kernel, account.roots)
    view = _view(account.roots, account.kubelet, site)
    managed = {gpu.address: gpu.wanted for gpu in view.gpus if gpu.wanted is not None and view.agent is not None}
    carved = {gpu.address: gpu.vgpu_config for gpu in view.gpus if gpu.vgpu_config is not None}
    names = onelook.read_ledger(*account.ledgers).type_names
    inputs = Inputs(account.account, names, frozenset(parsed(also)), force, readings=account.readings)
    return Host(site, inputs, managed, carved, account.roots.local(options.LEDGER).parent)


def _view(roots: HostRoots, kubelet: KubeletPaths, site: "Site") -> "NodeView":
    """Return the agent's picture, or one taken now, with what pods had by its ledger."""
    from gpuvirt.clock import RealClock
    from gpuvirt.model.settings import Settings
    from gpuvirt.node import onelook, statefile

    clock = RealClock()
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = statefile.read(roots.run / statefile.FILE, clock.now(), onelook.boot_id(site.kernel), procs)
    if view is not None:
        return view
    ledger = onelook.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return onelook.take(site.kernel, Settings(), options.read_pci_ids(None, roots), clock, ledger)


def parsed(texts: Iterable[str]) -> "Iterable[PciAddress]":
    """Yield the addresses in what was typed; raise BadParameter for what is none."""
    from gpuvirt.errors import InvalidIdError
    from gpuvirt.facts.ids import parse_pci_address

    for text in texts:
        try:
            yield parse_pci_address(text)
        except InvalidIdError as error:
            raise typer.BadParameter(str(error)) from error


def _heads(inventory: "Inventory", chosen: Chosen) -> "list[PciAddress]":
    """Return the GPUs and NVSwitches that are meant; raise BadParameter for what is none."""
    from gpuvirt.facts.ids import slot_of
    from gpuvirt.facts.pci import FunctionKind

    if chosen.every == bool(chosen.addresses):
        raise typer.BadParameter("give either addresses or --all")
    functions, gpus = inventory.facts.functions, inventory.gpus
    if chosen.every:
        switches = [one for one, function in functions.items() if function.kind is FunctionKind.NVSWITCH]
        heads = [*gpus, *(switches if chosen.nvswitches else ())]
        return [one for one in heads if chosen.vendor in {None, functions[one].id.vendor}]
    found = list(parsed(chosen.addresses))
    for address in found:
        if address not in functions:
            raise typer.BadParameter(f"{address}: there is no such function on this host (gpuvirt vfio status)")
        if address not in gpus and functions[address].kind is not FunctionKind.NVSWITCH:
            head = next((gpu for gpu in gpus if slot_of(gpu) == slot_of(address)), None)
            hint = f"it goes with its GPU, {head}" if head else "only GPUs and NVSwitches are moved"
            raise typer.BadParameter(f"{address} is no GPU; {hint}")
    return found


def change(host: Host, desired: "DesiredGpu", chosen: Chosen, output: Output, *, dry_run: bool) -> None:
    """Bring what is chosen to what is desired, and say how that went; end with 1 where it failed."""
    from gpuvirt.cli import vfiorender
    from gpuvirt.model.change.planner import plan_unit
    from gpuvirt.node.change.observation import observe

    seen = observe(host.site, host.inputs)
    heads = _heads(seen.inventory, chosen)
    emptied = {head: desired.vgpus for head in heads if desired.vgpus is not None and head in seen.inventory.gpus}
    state = seen.host_state(emptied)
    units = {
        unit: {one: replace(desired, vgpus=emptied.get(one)) for one in members if one in heads}
        for unit, members in sorted(seen.inventory.units.items())
        if not set(heads).isdisjoint(members)
    }
    plans = {unit: plan_unit(state, unit, wanted) for unit, wanted in units.items()}
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


def _would(host: Host, plan: "Plan", desired: "DesiredUnit") -> "Result":
    """Return what a plan says of itself, and what the agent would say of it."""
    from gpuvirt.cli.vfiorender import Result
    from gpuvirt.model import refusals
    from gpuvirt.model.change.drivers import driver_of

    kept = {gpu: host.managed[gpu] for gpu in desired if gpu in host.managed}
    managed = [refusals.managed(gpu, mode) for gpu, mode in kept.items() if driver_of(mode) is not desired[gpu].driver]
    reasons = (*managed, *plan.reasons)
    steps = () if reasons else tuple(step.text for step in plan.steps)
    return Result(plan.unit, tuple(desired), steps, reasons, plan.drivers.notes)


def _ask(plans: "Iterable[Plan]") -> None:
    """Have a person say yes to what may end the work of processes."""
    from gpuvirt.model.change.steps import Unbind

    if not sys.stdin.isatty():
        raise typer.BadParameter("--force asks a question, and standard input is no terminal to answer it")
    gpus = ", ".join(step.address for plan in plans for step in plan.steps if isinstance(step, Unbind))
    if gpus:
        typer.confirm(f"Take {gpus} from the host's drivers, whoever uses it?", abort=True)


def _changed(host: Host, desired: "DesiredUnit", would: "Result", seen: "Inventory", *, quiet: bool) -> "Result":
    """Change one unit in a lane, which is left behind where the kernel puts it to sleep."""
    from gpuvirt.cli.inlane import changed_in_lane
    from gpuvirt.model.isolation import UnitId

    intent = next(iter(would.steps), None)
    taken, outcome = changed_in_lane(host.ground, UnitId(would.unit), desired, seen, intent, quiet=quiet)
    return replace(would, steps=taken, reasons=outcome.reasons)

"""The output of `gpuvirt vfio`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from rich.text import Text

from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.reasons import Reason

NO_GPU = "No GPU of NVIDIA, AMD or Intel on this host."
COLUMNS = (
    Column("ADDRESS"),
    Column("DRIVER"),
    Column("GROUP"),
    Column("SIBLINGS", folds=True),
    Column("FOR VMS", folds=True),
)


class VfioResult(msgspec.Struct, frozen=True):
    """The result of a change of one isolation unit."""

    unit: str
    gpus: tuple[str, ...]
    steps: tuple[str, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()


class VfioGpu(msgspec.Struct, frozen=True):
    """One GPU, or a VF that is a part of one, and its drivers."""

    address: PciAddress
    driver: str | None
    group: int | None
    siblings: dict[str, str | None]
    """The other functions of the GPU's slot, with their drivers."""
    on_vfio: bool
    steps: tuple[str, ...]
    reasons: tuple[Reason, ...]


def status(
    seen: UnitState,
    rows: Iterable[tuple[PciAddress, DriverPlan]],
    unfit: Mapping[PciAddress, tuple[Reason, ...]],
    *,
    output: Output,
) -> None:
    """Print the driver of each GPU and VF, and whether it is or could be bound for VMs.

    `unfit`: why no VM could use it.
    """
    shown = [_row(seen, address, plan, unfit.get(address, ())) for address, plan in rows]
    if render.print_document(shown, output):
        return
    out = console()
    if not shown:
        out.print(NO_GPU)
        return
    table = Table(COLUMNS)
    for row in shown:
        group = NOTHING if row.group is None else str(row.group)
        table.add(row.address, row.driver or NOTHING, group, _siblings(row), _answer(row))
    table.print(out)
    for reason in dict.fromkeys(chain.from_iterable(row.reasons for row in shown)):
        render.say_reason(out, reason)


def results(done: Sequence[VfioResult], desired: DesiredGpu, *, output: Output, dry_run: bool) -> None:
    """Print the result of each change, or of its dry run."""
    if render.print_document(done, output):
        return
    out = console()
    if not done:
        out.print(NO_GPU)
    for result in done:
        gpus = ", ".join(result.gpus)
        if dry_run:
            for step in result.steps:
                out.print(step, soft_wrap=True)
        for reason in result.reasons:
            render.say_reason(out, reason, style="yellow")
        for note in result.notes:
            say(out, note)
        if not result.reasons:
            bound = "bound for VMs" if desired.driver is DesiredDriver.PASSTHROUGH else "bound for the host"
            would = "would be " if dry_run and result.steps else ""
            already = "" if result.steps else "already "
            say(out, f"{gpus}: {would}{already}{bound}", style="green")


def _row(seen: UnitState, address: PciAddress, plan: DriverPlan, unfit: tuple[Reason, ...]) -> VfioGpu:
    functions, gpu = seen.inventory.facts.functions, seen.inventory.gpus.get(address)
    function = functions[address]
    return VfioGpu(
        address=address,
        driver=_driver(function),
        group=function.iommu_group if isinstance(function.iommu_group, int) else None,
        siblings={sibling: _driver(functions[sibling]) for sibling in (gpu.siblings if gpu is not None else ())},
        on_vfio=function.on_vfio,
        steps=tuple(step.text for step in plan.steps),
        reasons=tuple(dict.fromkeys((*plan.refusals, *unfit))),
    )


def _driver(function: PciFunction) -> str | None:
    return None if isinstance(function.driver, Unread) else function.driver


def _siblings(row: VfioGpu) -> str:
    siblings = (f"{name.rpartition(':')[2]} ({driver or 'no driver'})" for name, driver in row.siblings.items())
    return ", ".join(siblings) or NOTHING


def _answer(row: VfioGpu) -> Text:
    if row.reasons:
        return Text(", ".join(dict.fromkeys(str(reason.code) for reason in row.reasons)), style="yellow")
    if not row.steps:
        return Text("yes", style="green")
    return Text("partly: gpuvirt vfio bind" if row.on_vfio else "possible: gpuvirt vfio bind")

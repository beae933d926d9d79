"""The output of `gpuvirt vfio` and `gpuvirt vgpu`."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain

import msgspec
from rich.console import Console
from rich.text import Text

from gpuvirt.cli.formats import Layout, ListFormat, Output
from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import is_vf_type
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.vgpus.gpustate import GpuState, is_mig
from gpuvirt.model.reasons import Reason
from gpuvirt.model.vgputypes.profiles import profile_name

NO_GPU = "No GPU of NVIDIA, AMD or Intel on this host."
VFIO_COLUMNS = (
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


def vfio_status(
    seen: UnitState,
    rows: Iterable[tuple[PciAddress, DriverPlan]],
    unfit: Mapping[PciAddress, tuple[Reason, ...]],
    listing: ListFormat,
) -> None:
    """Print the driver of each GPU and VF, and whether it is or could be bound for VMs.

    `unfit`: why no VM could use it.
    """
    shown = [_row(seen, address, plan, unfit.get(address, ())) for address, plan in rows]
    render.print_list(shown, (row.address for row in shown), partial(_vfio_table, shown), listing)


def _vfio_table(rows: Sequence[VfioGpu], layout: Layout) -> None:
    out = console()
    table = Table(VFIO_COLUMNS)
    for row in rows:
        group = NOTHING if row.group is None else str(row.group)
        table.add(row.address, row.driver or NOTHING, group, _siblings(row), _answer(row))
    if rows:
        table.print(out, layout)
    if not layout.headings:
        return
    if not rows:
        out.print(NO_GPU)
    for reason in dict.fromkeys(chain.from_iterable(row.reasons for row in rows)):
        render.say_reason(out, reason)


def vfio_results(done: Sequence[VfioResult], desired: DesiredGpu, *, output: Output, dry_run: bool) -> None:
    """Print the result of each change, or of its dry run."""
    if render.print_document(done, output):
        return
    out = console()
    if not done:
        out.print(NO_GPU)
    for result in done:
        gpus = ", ".join(result.gpus)
        print_planned(out, result.steps if dry_run else ())
        for reason in result.reasons:
            render.say_reason(out, reason, style="yellow")
        if not result.reasons:
            bound = "bound for VMs" if desired.driver is DesiredDriver.PASSTHROUGH else "bound for the host"
            would = "would be " if dry_run and result.steps else ""
            already = "" if result.steps else "already "
            say(out, f"{gpus}: {would}{already}{bound}", style="green")


def print_planned(out: Console, steps: Iterable[str]) -> None:
    """Print steps that are not taken: those that a change takes are printed alone, when they begin."""
    for step in steps:
        out.print(Text.assemble(("would: ", "dim"), step), soft_wrap=True)


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


VGPU_COLUMNS = (
    Column("VGPU"),
    Column("TYPE"),
    Column("GPU"),
    Column("ON", folds=True, optional=True),
    Column("GROUP", folds=True),
    Column("USED BY", folds=True),
)
TYPE_COLUMNS = (
    Column("GPU"),
    Column("TYPE"),
    Column("IN CONFIGS"),
    Column("EXISTING"),
    Column("COULD BE MADE", folds=True),
)


class VgpuResult(msgspec.Struct, frozen=True):
    """The result of a change of one GPU, or of its dry run."""

    gpu: PciAddress
    steps: tuple[str, ...]
    reasons: tuple[Reason, ...]
    desired_counts: dict[str, int] | None = None
    """The GPU's desired vGPUs by type; None if the command only removes vGPUs."""


class VgpuRow(msgspec.Struct, frozen=True):
    """One vGPU; `parent` is `gpu` or one of its VFs."""

    id: VgpuId
    type: str
    gpu: PciAddress
    parent: PciAddress
    group: int | None
    users: tuple[str, ...]


class TypeRow(msgspec.Struct, frozen=True):
    """One vGPU type on one GPU."""

    gpu: PciAddress
    type: str
    name: str
    """The type's name in vGPU configs."""
    there: int
    """How many vGPUs of the type the GPU carries."""
    left: int
    """How many more fit beside the vGPUs of the GPU."""


def rows_of(gpu_states: Mapping[PciAddress, GpuState]) -> list[VgpuRow]:
    """Return the existing vGPUs."""
    return [
        VgpuRow(
            vgpu.id,
            "unknown" if isinstance(vgpu.type, Unread) else vgpu.type,
            gpu,
            vgpu.parent,
            vgpu.group if isinstance(vgpu.group, int) else None,
            gpu_state.users.get(vgpu.id, ()),
        )
        for gpu, gpu_state in gpu_states.items()
        for vgpu in sorted(gpu_state.host.live, key=lambda vgpu: (vgpu.parent, vgpu.id))
    ]


def types_of(gpu_states: Mapping[PciAddress, GpuState]) -> list[TypeRow]:
    """Return for each GPU and vGPU type how many vGPUs exist, and how many more fit."""
    return [
        TypeRow(
            gpu,
            vgpu_type,
            profile_name(vgpu_type),
            sum(1 for vgpu in gpu_state.host.live if vgpu.type == vgpu_type),
            _left(gpu_state, vgpu_type),
        )
        for gpu, gpu_state in gpu_states.items()
        for vgpu_type in gpu_state.known_types
    ]


def _left(gpu_state: GpuState, vgpu_type: VgpuType) -> int:
    """Return how many more vGPUs of a type fit on a GPU.

    Each VF says for itself whether it can carry a vGPU; all of them together can carry no more than the card holds.
    """
    left = sum(left.get(vgpu_type, 0) for left in gpu_state.host.creatable.values())
    most = gpu_state.most.get(vgpu_type)
    if most is None:
        return left
    live = [vgpu.type for vgpu in gpu_state.host.live if not isinstance(vgpu.type, Unread)]
    if is_mig(vgpu_type):  # instances of several sizes fit beside each other by the card's own rules
        return min(left, max(most - live.count(vgpu_type), 0))
    free = 1 - sum((Fraction(1, gpu_state.most[other]) for other in live if gpu_state.most.get(other)), Fraction())
    return min(left, max(int(free * most), 0))


def vgpus(rows: Sequence[VgpuRow], layout: Layout) -> None:
    """Print the table of vGPUs."""
    out = console()
    if not rows and layout.headings:
        out.print("No vGPU on this host.")
    if not rows:
        return
    table = Table(VGPU_COLUMNS)
    for row in rows:
        group = NOTHING if row.group is None else str(row.group)
        on = NOTHING if row.parent in {row.gpu, row.id} else row.parent
        table.add(row.id, row.type, row.gpu, on, group, ", ".join(row.users) or NOTHING)
    table.print(out, layout)


def no_vgpu_hosts(out: Console, why: Iterable[Reason], layout: Layout) -> None:
    """Print that a list has no GPU, and why, by GPU; a list without headings is for programs."""
    if not layout.headings:
        return
    reasons = list(why)
    out.print(f"No GPU to list now{'' if reasons else '; see: gpuvirt doctor'}")
    for reason in reasons:
        render.say_reason(out, reason, style="yellow")


def types(rows: Sequence[TypeRow], why_none: Iterable[Reason], layout: Layout) -> None:
    """Print the table of vGPU types; `why_none`: why GPUs have none."""
    out = console()
    if not rows:
        no_vgpu_hosts(out, why_none, layout)
        return
    table = Table(TYPE_COLUMNS)
    for row in rows:
        in_configs = NOTHING if is_vf_type(row.type) else row.name
        table.add(row.gpu, row.type, in_configs, str(row.there), str(row.left))
    table.print(out, layout)
    for reason in why_none if layout.headings else ():
        render.say_reason(out, reason, style="yellow")


def vgpu_results(done: Sequence[VgpuResult], *, output: Output, dry_run: bool, unfit: bool = False) -> None:
    """Print the result of each change, or of its dry run; `unfit`: GPUs were selected that can't have the types."""
    if render.print_document(done, output):
        return
    out = console()
    for result in done:
        print_planned(out, result.steps if dry_run else ())
        for reason in result.reasons:
            render.say_reason(out, reason, style="yellow")
        if not result.reasons and result.desired_counts is not None:
            carries = ", ".join(_counted(*each) for each in sorted(result.desired_counts.items())) or "no vGPU"
            would = "would then carry" if dry_run and result.steps else "carries"
            already = "" if result.steps else " already"
            say(out, f"{result.gpu}: {would} {carries}{already}", style="green")
    if not done and not unfit:
        out.print("The vGPU config names no GPU of this host.")


def _counted(name: str, count: int) -> str:
    return name if is_vf_type(name) and count == 1 else f"{count} {name}"

"""The output of `gpuvirt schedule check`: what the hypervisor can do with workers, and what phases change on nodes."""

from collections.abc import Iterator, Mapping

from rich.text import Text

from gpuvirt.cli.output.render import say_reason
from gpuvirt.cli.output.tables import NOTHING, Cell, Column, Table, console, say
from gpuvirt.model.reasons import with_code
from gpuvirt.model.workers.hypervisor import Ability
from gpuvirt.model.workers.spec import Leave, VmPolicy
from gpuvirt_schedules.commands.schedulerender import UNKNOWN, below, head
from gpuvirt_schedules.decide.noderows import NodeCheck
from gpuvirt_schedules.decide.workerchecks import ScheduleCheck, WorkerCheck

CHECK_COLUMNS = (
    Column("NODE"),
    Column("PHASES", folds=True),
    Column("VM", folds=True),
    Column("POWER"),
    Column("VGPUS", folds=True, optional=True),
    Column("SUSPEND"),
    Column("SHUT DOWN"),
    Column("START"),
    Column("SET TYPE", optional=True),
)
NODE_COLUMNS = (
    Column("NODE"),
    Column("PHASE"),
    Column("VGPU CONFIG"),
    Column("CHANGES"),
    Column("IN THE WAY NOW", folds=True, optional=True),
)
NOT_PROVEN = "not proven"


def check(found: ScheduleCheck) -> None:
    """Print what the hypervisor says of each worker, what changes on each node, and whether the schedule can switch."""
    out = console()
    head(out, found.schedule)
    if found.hypervisor is not None:
        say_reason(out, found.hypervisor, style="bold red")
    table = Table(CHECK_COLUMNS)
    for worker in found.workers:
        table.add(*check_cells(worker, found.leave), below=_check_texts(worker, found.leave))
    below(out, table, is_empty=not found.workers)
    nodes = Table(NODE_COLUMNS)
    for node in found.nodes:
        nodes.add(*node_cells(node), below=node_texts(node))
    below(out, nodes, is_empty=not found.nodes)
    out.print()
    what = "workers and nodes" if found.nodes and found.workers else "nodes" if found.nodes else "workers"
    if found.holds:
        say(out, f"No known obstacle keeps the {what} from switching.", style="green")
    else:
        say(out, f"The schedule can't switch all {what}.", style="bold red")


def check_cells(worker: WorkerCheck, leave: Leave) -> tuple[Cell, ...]:
    """Return the cells of one worker; what the schedule does not use is dim."""
    return (
        worker.node,
        ", ".join(worker.phases) or NOTHING,
        worker.vm or NOTHING,
        str(worker.power) if worker.power is not None else UNKNOWN,
        ", ".join(worker.vgpu_types) or NOTHING,
        _ability(worker.suspend, used=worker.leaves(leave) is worker.suspend),
        _ability(worker.shut_down, used=worker.leaves(leave) is worker.shut_down),
        _ability(worker.start, used=True),
        _ability(worker.set_vgpu_type, used=True) if worker.is_retyped else NOTHING,
    )


def _ability(ability: Ability | None, *, used: bool) -> Text:
    if ability is None:
        return Text(UNKNOWN, style="yellow" if used else "dim")
    word = {True: "yes", False: "no", None: NOT_PROVEN}[ability.is_possible]
    style = {True: "green", False: "bold red", None: "yellow"}[ability.is_possible]
    return Text(word, style=style if used else "dim")


def _check_texts(worker: WorkerCheck, leave: Leave) -> tuple[str, ...]:
    used = worker.used(leave)
    whys = (with_code(ability.code, ability.text) for ability in used if ability is not None and ability.code)
    reason = () if worker.reason is None else (worker.reason.text,)
    types = (f"vGPU types of its phases: {', '.join(worker.phase_types)}",) if worker.is_retyped else ()
    return (*reason, *types, *dict.fromkeys(whys), *worker.remarks)


def node_cells(node: NodeCheck) -> tuple[Cell, ...]:
    """Return the cells of a node in a phase."""
    if node.reason is not None:
        changes = Text("no", style="bold red")
    elif node.unknown:
        changes = Text(UNKNOWN, style="yellow")
    else:
        changes = Text(_gpus(len(node.gpus)) if node.gpus else "none", style="green")
    users = ", ".join(node.in_the_way)
    return node.node, node.phase, node.vgpu_config, changes, Text(users, style="yellow") if users else NOTHING


def node_texts(node: NodeCheck) -> Iterator[str]:
    """Yield the lines below a node: why it would not change, and what would on each GPU."""
    if node.reason is not None:
        yield node.reason.text
    yield from (f"not known: {text}" for text in node.unknown)
    for gpu in node.gpus:
        then = UNKNOWN if gpu.vgpus_then is None else counts(gpu.vgpus_then)
        waits = " (while these users stay)" if gpu.in_the_way else ""
        yield f"{gpu.address}: {counts(gpu.vgpus)} -> {then}{waits}"
        yield from (f"{gpu.address}: {text}" for text in gpu.reasons)
    if node.in_the_way and node.vms is VmPolicy.STOP:
        yield "VMs among these users are shut down (vms: Stop), if all users of their GPU are VMs that may be"
    for text in dict.fromkeys(text for gpu in node.gpus for text in gpu.unknown):
        yield f"not known here: {text}"


def counts(vgpus: Mapping[str, int]) -> str:
    """Return vGPUs by type: `4 x A10-4Q`."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(vgpus.items())) or "no vGPUs"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

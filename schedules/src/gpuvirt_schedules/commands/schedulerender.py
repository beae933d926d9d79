"""The output of `gpuvirt schedule`: schedules, workers, switches, steps and checks, with times in its zone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.text import Text

from gpuvirt.cli.formats import Layout
from gpuvirt.cli.output.render import say_reason
from gpuvirt.cli.output.tables import NOTHING, Cell, Column, Table, console, say
from gpuvirt.model.reasons import Reason, with_code
from gpuvirt.model.workers.hypervisor import Ability
from gpuvirt.model.workers.spec import Leave, VmPolicy
from gpuvirt.model.workers.status import Outcome, PastSwitch
from gpuvirt_schedules.decide.forecast import Forecast, ForecastBudget, PlannedAction, PlannedStep
from gpuvirt_schedules.decide.reports import (
    NodeCheck,
    NodeRow,
    PhaseRow,
    ScheduleCheck,
    ScheduleDetail,
    ScheduleHistory,
    SchedulePlan,
    ScheduleRow,
    ScheduleState,
    SwitchResult,
    SwitchRow,
    VmRow,
    WorkerCheck,
    WorkerRow,
)
from gpuvirt_schedules.decide.times import ZoneError, zone_of

STYLES = {
    ScheduleState.READY: "green",
    ScheduleState.INVALID: "bold red",
    ScheduleState.HELD: "bold red",
    ScheduleState.SWITCHING: "cyan",
    ScheduleState.PAUSED: "yellow",
    ScheduleState.PENDING: "yellow",
}
OUTCOME_STYLES = {Outcome.REACHED: "green", Outcome.UNDER_WAY: "cyan"}
SCHEDULE_COLUMNS = (
    Column("NAME"),
    Column("STATE"),
    Column("PHASE"),
    Column("NEXT"),
    Column("AT"),
    Column("WORKERS", folds=True, optional=True),
    Column("NODES", folds=True, optional=True),
    Column("REASON", folds=True, optional=True),
)
PHASE_COLUMNS = (
    Column("PHASE"),
    Column("START"),
    Column("NEXT START"),
    Column("WORKERS", folds=True, optional=True),
    Column("VGPU TYPES", folds=True, optional=True),
    Column("NODES", folds=True, optional=True),
    Column("VGPU CONFIG", folds=True, optional=True),
    Column("VMS", optional=True),
)
OVERRIDE_COLUMNS = (Column("OVERRIDE"), Column("FROM"), Column("UNTIL"))
WORKER_COLUMNS = (
    Column("NODE"),
    Column("PHASES", folds=True),
    Column("VM", folds=True),
    Column("STEP"),
    Column("SINCE"),
    Column("FORCED", folds=True, optional=True),
)
NODE_COLUMNS = (Column("NODE"), Column("PHASE"), Column("VGPU CONFIG"), Column("APPLIED"))
VM_COLUMNS = (
    Column("VM", folds=True),
    Column("NODE"),
    Column("PHASE"),
    Column("STEP"),
    Column("SINCE"),
    Column("FORCED", optional=True),
)
SWITCH_COLUMNS = (Column("AT"), Column("PHASE"), Column("ANNOUNCED"))
HISTORY_COLUMNS = (
    Column("BEGAN"),
    Column("PHASES"),
    Column("TOOK"),
    Column("OUTCOME"),
    Column("CAUSE"),
    Column("EVICTED"),
    Column("DELETED", folds=True, optional=True),
    Column("BY", folds=True, optional=True),
)
STEP_COLUMNS = (
    Column("NODE"),
    Column("ACTION"),
    Column("TARGET"),
    Column("BUDGETS", folds=True, optional=True),
)
UNKNOWN = "unknown"


def when(at: datetime | None, zone: str) -> str:
    """Return a time in a zone: `Mon 2026-01-05 20:00 CET`; in UTC if the zone is unknown."""
    if at is None:
        return NOTHING
    try:
        return f"{at.astimezone(zone_of(zone)):%a %Y-%m-%d %H:%M %Z}"
    except ZoneError:
        return f"{at.astimezone(UTC):%a %Y-%m-%d %H:%M UTC}"


def schedules(rows: Sequence[ScheduleRow], layout: Layout, *, namespace: str | None) -> None:
    """Print the table of a namespace's schedules, each with its reasons below it; None: of all, with namespaces."""
    everywhere = namespace is None
    out, table = console(), Table((*((Column("NAMESPACE"),) if everywhere else ()), *SCHEDULE_COLUMNS))
    for row in rows:
        first = (row.namespace,) if everywhere else ()
        table.add(*first, *schedule_cells(row), below=(reason.text for reason in row.reasons))
    if rows:
        table.print(out, layout)
    elif layout.headings:
        other = f"The namespace {namespace} has no VgpuSchedule; choose another with --namespace NAME, or all with -A."
        say(out, "The cluster has no VgpuSchedule." if everywhere else other)


def schedule_cells(row: ScheduleRow) -> tuple[Cell, ...]:
    """Return the cells of one schedule."""
    return (
        row.name,
        Text(row.state, style=STYLES[row.state]),
        row.phase or NOTHING,
        row.next_phase or NOTHING,
        when(row.next_switch, row.time_zone),
        str(row.workers) if row.workers or not row.nodes else NOTHING,
        str(row.nodes) if row.nodes else NOTHING,
        ", ".join(dict.fromkeys(str(reason.code) for reason in row.reasons)) or NOTHING,
    )


def detail(found: ScheduleDetail) -> None:
    """Print one schedule: its spec, its workers, and what they wait for."""
    out, row = console(), found.schedule
    head(out, row)
    drain = f"drain {found.drain_timeout_s:g} s, then {found.on_timeout}"
    text = f"announce {found.announce_s:g} s, {drain}, leave {found.leave}, {found.hypervisor or 'no hypervisor'}"
    say(out, text, style="dim")
    zone = row.time_zone
    below(out, PHASE_COLUMNS, [(phase_cells(phase, zone), ()) for phase in found.phases])
    if found.configs is not None:
        say(out, found.configs, style="yellow")
    spans = ((entry.phase, when(entry.begin, zone), when(entry.end, zone)) for entry in found.overrides)
    below(out, OVERRIDE_COLUMNS, [(cells, ()) for cells in spans])
    below(out, WORKER_COLUMNS, [(worker_cells(worker, zone), _why(worker.reason)) for worker in found.workers])
    below(out, NODE_COLUMNS, [(applied_cells(node), _why(node.reason)) for node in found.nodes])
    below(out, VM_COLUMNS, [(vm_cells(vm, zone), _why(vm.reason)) for vm in found.vms])


def _why(reason: Reason | None) -> tuple[str, ...]:
    return () if reason is None else (reason.text,)


def applied_cells(node: NodeRow) -> tuple[Cell, ...]:
    """Return the cells of a node whose vGPU config the current phase sets."""
    applied = Text("yes", style="green") if node.applied else Text("no", style="yellow")
    return node.node, node.phase, node.vgpu_config, applied


def phase_cells(phase: PhaseRow, zone: str) -> tuple[Cell, ...]:
    """Return the cells of a phase."""
    return (
        phase.name,
        phase.start,
        when(phase.next_start, zone),
        phase.workers or NOTHING,
        ", ".join(phase.vgpu_types) or NOTHING,
        phase.nodes or NOTHING,
        phase.vgpu_config or NOTHING,
        NOTHING if phase.vms is VmPolicy.WAIT else str(phase.vms),
    )


def vm_cells(vm: VmRow, zone: str) -> tuple[Cell, ...]:
    """Return the cells of a VM whose vGPU the vGPU config of a phase removes."""
    step = Text(f"{vm.step} (held)", style="bold red") if vm.held else Text(vm.step)
    return vm.vm, vm.node, vm.phase, step, when(vm.since, zone), "yes" if vm.forced else NOTHING


def worker_cells(worker: WorkerRow, zone: str) -> tuple[Cell, ...]:
    """Return the cells of one worker."""
    step = Text(f"{worker.step} (held)", style="bold red") if worker.held else Text(worker.step)
    return (
        worker.node,
        ", ".join(worker.phases) or NOTHING,
        worker.vm or NOTHING,
        step,
        when(worker.since, zone),
        str(worker.forced) if worker.forced else NOTHING,
    )


def plan(found: SchedulePlan) -> None:
    """Print the switches of two weeks, and the steps of the next one."""
    out, row = console(), found.schedule
    head(out, row)
    if row.state is ScheduleState.INVALID:
        return
    if not found.switches:
        say(out, "No other phase begins within two weeks.")
    else:
        out.print()
        switches(found.switches, row.time_zone).print(out)
    for switch in found.left_out:
        day = when(switch.at, row.time_zone)
        say(out, f"Phase {switch.phase} does not begin before {day}: the clocks skip the hour of its window then.")
    if found.forecast is not None:
        out.print()
        steps(out, found.forecast, row.time_zone, found.assumed)


def history(found: ScheduleHistory) -> None:
    """Print the last switches."""
    out, row = console(), found.schedule
    head(out, row)
    if not found.switches:
        say(out, "The controller has recorded no switch.")
        return
    out.print()
    table = Table(HISTORY_COLUMNS)
    for past in found.switches:
        table.add(*history_cells(past, row.time_zone))
    table.print(out)


def history_cells(past: PastSwitch, zone: str) -> tuple[Cell, ...]:
    """Return the cells of one of the last switches."""
    took = NOTHING if past.ended is None else str(timedelta(seconds=round((past.ended - past.began).total_seconds())))
    return (
        when(past.began, zone),
        f"{past.before or NOTHING} -> {past.phase}",
        took,
        Text(past.outcome, style=OUTCOME_STYLES.get(past.outcome, "yellow")),
        past.cause,
        str(past.evicted),
        Text(str(past.deleted), style="yellow") if past.deleted else "",
        past.by,
    )


def switches(rows: Iterable[SwitchRow], zone: str) -> Table:
    """Return the table of switches."""
    table = Table(SWITCH_COLUMNS)
    for switch in rows:
        table.add(when(switch.at, zone), switch.phase, when(switch.announced, zone))
    return table


def steps(out: Console, found: Forecast, zone: str, assumed: Reason | None) -> None:
    """Print the steps of a transition, and the workers that they do not bring to its end."""
    say(out, f"Steps to phase {found.phase} at {when(found.at, zone)}, from the state observed now:", style="bold")
    if assumed is not None:
        say(out, "The hypervisor was not read: the VM of a Ready node is assumed to be on, any other to be off.")
        say_reason(out, assumed, style="yellow")
    if found.steps:
        step_table(found.steps).print(out)
    else:
        say(out, "No step is needed." if not found.waiting else "No step can be taken.")
    for worker in found.waiting:
        say(out, f"{worker.node} stays in step {worker.step}:", style="yellow")
        say_reason(out, worker.reason)


def step_table(rows: Iterable[PlannedStep]) -> Table:
    """Return the table of steps in their order."""
    table = Table(STEP_COLUMNS)
    for step in rows:
        # Which VMs are stopped is decided once the node's agent reports what it waits for.
        is_open = step.action is PlannedAction.STOP_VMS
        target = f"VMs whose vGPUs {step.target} removes" if is_open else step.target
        table.add(step.node, step.action, target, _budgets(step.budgets))
    return table


def _budgets(budgets: tuple[ForecastBudget, ...] | None) -> Cell:
    if budgets is None:
        return Text(f"{UNKNOWN}: PodDisruptionBudgets may not be listed", style="yellow")
    text = ", ".join(f"{budget.name} allows {budget.allowed}" for budget in budgets)
    return Text(text or NOTHING, style="yellow" if any(budget.allowed < 1 for budget in budgets) else "")


def switch(found: SwitchResult) -> None:
    """Print the steps of a switch by hand, before it is written."""
    out, row = console(), found.schedule
    head(out, row)
    if row.state is ScheduleState.INVALID:
        return
    if found.forecast is None:
        until = f" until {when(found.end, row.time_zone)}" if row.next_switch is not None else ""
        say(out, f"Phase {found.phase} is already in effect{until}; --until TIME extends it.")
        return
    say(out, f"Phase {found.phase} will be in effect until {when(found.end, row.time_zone)}.")
    if row.state is ScheduleState.PAUSED:
        say(out, "spec.suspend is set: no step is taken before it is removed.", style="yellow")
    out.print()
    steps(out, found.forecast, row.time_zone, found.assumed)


def switched(found: SwitchResult) -> None:
    """Print whether a switch was written."""
    if found.written:
        say(
            console(),
            f"The override is written; gpuvirt schedule show {found.schedule.name} shows the progress of the workers.",
        )


def head(out: Console, row: ScheduleRow) -> None:
    """Print the state of a schedule, and what is wrong with its spec."""
    phase = f", phase {row.phase}" if row.phase is not None else ""
    following = f", phase {row.next_phase} at {when(row.next_switch, row.time_zone)}" if row.next_phase else ""
    say(out, Text(f"schedule {row.name}: {row.state}{phase}{following}", style=STYLES[row.state]))
    if row.state is ScheduleState.INVALID:
        for reason in row.reasons:
            say_reason(out, reason)


def below(out: Console, columns: Sequence[Column], rows: Sequence[tuple[Sequence[Cell], Iterable[str]]]) -> None:
    """Print a table below what was printed, if it has rows: the cells of each, and the texts below it."""
    if not rows:
        return
    table = Table(columns)
    for cells, texts in rows:
        table.add(*cells, below=texts)
    out.print()
    table.print(out)


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
NODE_CHECK_COLUMNS = (
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
    leave = found.leave
    workers = [(check_cells(worker, leave), _check_texts(worker, leave)) for worker in found.workers]
    below(out, CHECK_COLUMNS, workers)
    below(out, NODE_CHECK_COLUMNS, [(node_cells(node), node_texts(node)) for node in found.nodes])
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
    types = (f"vGPU types of its phases: {', '.join(worker.phase_types)}",) if worker.is_retyped else ()
    return (*_why(worker.reason), *types, *dict.fromkeys(whys), *worker.remarks)


def node_cells(node: NodeCheck) -> tuple[Cell, ...]:
    """Return the cells of a node in a phase."""
    if node.reason is not None:
        changes = Text("no", style="bold red")
    elif node.unknown:
        changes = Text(UNKNOWN, style="yellow")
    else:
        count = len(node.gpus)
        changes = Text("none" if not count else "1 GPU" if count == 1 else f"{count} GPUs", style="green")
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

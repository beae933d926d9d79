"""`gpuvirt schedule`: shows, plans and checks VgpuSchedules, and switches one to a phase by hand."""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt import documents
from gpuvirt.cli.formats import ListFormat, ListOutput, Output
from gpuvirt.cli.output import render, watching
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.cli.parameters.vgpuconfigs import STDIN
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.commands.schedulequestions import ScheduleQuestions
from gpuvirt_schedules.controller.commandreading import written_schedule
from gpuvirt_schedules.decide.reports import ScheduleRow, ScheduleState, SwitchResult

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, plan and check VgpuSchedules, and switch phases.",
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the VgpuSchedule.")]
PlannedName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The name of the VgpuSchedule.")]
PlannedFile = Annotated[
    str | None,
    typer.Option(
        "--filename", "-f", metavar="FILE", help="YAML of a VgpuSchedule to plan, in place of NAME; -: standard input."
    ),
]
Phase = Annotated[str, typer.Argument(metavar="PHASE", help="The phase that begins now.")]
Until = Annotated[
    str,
    typer.Option(
        "--until",
        metavar="TIME",
        help="Time from which the cron lines apply again: 2026-12-28T07:00 or 07:00, in the schedule's time zone."
        " Default: the next switch.",
    ),
]


def _questions(kubeconfig: Path | None, context: str, namespace: str) -> ScheduleQuestions:
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    return ScheduleQuestions(Client(credentials), apiserver.own_namespace(namespace, credentials), RealClock())


def _written(file: str) -> VgpuSchedule:
    if file == STDIN:
        return written_schedule(sys.stdin.read(), "standard input")
    return written_schedule(documents.text_of(Path(file)), file)


@app.command("list")
def list_(  # noqa: PLR0913  a command's options
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the schedules of all namespaces.")
    ] = False,
    selector: Annotated[str, fleet.selector_option("schedules")] = "",
    watch: watching.WatchOption = False,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """List the schedules: the phase of each, and its next switch.

    The command reads the VgpuSchedules of the controller's namespace, which are those that the controller follows.
    """
    listing, questions = ListFormat(output, no_headers), _questions(kubeconfig, context, namespace)

    def print_rows(rows: tuple[ScheduleRow, ...]) -> None:
        table = partial(schedulerender.schedules, rows, namespace=None if everywhere else questions.namespace)
        render.print_list(rows, (row.name for row in rows), table, listing)

    watching.print_read(partial(questions.rows, selector, everywhere=everywhere), print_rows, listing, watch=watch)


@app.command()
def show(
    name: Name,
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show one schedule: its phases, its workers and nodes, and what each waits for.

    It exits with 1 if nothing is done for the schedule, or if a worker is held.
    """
    found = asyncio.run(_questions(kubeconfig, context, namespace).detail(name))
    if not render.print_document(found, output):
        schedulerender.detail(found)
    raise typer.Exit(1 if found.schedule.state in {ScheduleState.INVALID, ScheduleState.HELD} else 0)


@app.command()
def history(
    name: Name,
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the last 50 switches of a schedule, as its status has them, the newest first.

    Each has its time, its cause, the user of a switch by hand, and how many pods were evicted.
    """
    found = asyncio.run(_questions(kubeconfig, context, namespace).history(name))
    if not render.print_document(found, output):
        schedulerender.history(found)


@app.command()
def plan(
    name: PlannedName = None,
    *,
    file: PlannedFile = None,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the switches of two weeks, and the steps of the next one, with its pods and budgets.

    With a file, the command plans the schedule as the file has it, before it is applied.

    The steps follow from what is observed now: nodes, pods, PodDisruptionBudgets, volumes, and the hypervisor's VMs,
    which are read with the schedule's Secret. The command changes nothing. It exits with 1 if the spec has faults, or
    if a worker would be held.
    """
    if (name is None) is (file is None):
        raise ConfigError("expected either the name of a VgpuSchedule, or a file with one", where="--filename")
    questions = _questions(kubeconfig, context, namespace)
    found = asyncio.run(questions.plan_of(_written(file)) if file is not None else questions.plan(name or ""))
    if not render.print_document(found, output):
        schedulerender.plan(found)
    stays = found.forecast is not None and bool(found.forecast.waiting)
    raise typer.Exit(1 if stays or found.schedule.state is ScheduleState.INVALID else 0)


@app.command()
def check(
    name: Name,
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Check whether workers' VMs can switch, and plan the changes of each phase on nodes; change nothing.

    For nodes with a vGPU config, the command says which vGPUs each phase would change, and which VMs and pods use them
    now: a node waits for those. For workers, it reads the schedule's Secret, and needs gpuvirt's
    extra for the hypervisor (gpuvirt-schedules[vsphere] or [libvirt]; none for KubeVirt); gpuvirt's image has both.

    It exits with 1 if a known obstacle keeps a worker or a node from switching, or if the hypervisor does not answer.
    Unproven and unknown facts do not count, nor do users of vGPUs, which may be gone by then.
    """
    found = asyncio.run(_questions(kubeconfig, context, namespace).check(name))
    if not render.print_document(found, output):
        schedulerender.check(found)
    raise typer.Exit(0 if found.holds else 1)


@app.command()
def switch(  # noqa: PLR0913  a command's options
    name: Name,
    phase: Phase,
    *,
    until: Until = "",
    dry_run: options.DryRun = False,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Switch a schedule to a phase now, until a time or its next switch.

    The command prints the steps with their pods and budgets, then adds an override to the schedule's spec, which the
    controller follows. Nothing is written if the schedule has changed meanwhile. It exits with 1 if nothing can be
    written.
    """

    def before(found: SwitchResult) -> None:
        if output is Output.TABLE:
            schedulerender.switch(found)

    questions = _questions(kubeconfig, context, namespace)
    found = asyncio.run(questions.switch(name, phase, until, writes=not dry_run, before=before))
    if not render.print_document(found, output):
        if found.forecast is None:
            schedulerender.switch(found)
        schedulerender.switched(found)
    raise typer.Exit(1 if found.schedule.state is ScheduleState.INVALID else 0)

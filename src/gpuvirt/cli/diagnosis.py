"""What people see of a diagnosis: a line for each part of the way, and what is not in order at length."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from gpuvirt.cli.tables import console, paragraph, printable, say
from gpuvirt.model.doctor.explanation import NOT_REACHED, Standing, Way
from gpuvirt.model.doctor.findings import Area, Finding, Report, Result, worst
from gpuvirt.model.reasons.codes import Level

STYLES = {Level.OK: "green", Level.UNKNOWN: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
WAY_STYLES = {Standing.OK: "green", Standing.BLOCKED: "bold red", Standing.SKIPPED: "dim"}
INDENT = " " * 9
"""The width of a level and what is around it."""


def report(found: Report, *, every: bool) -> None:
    """Write a report: an area that is in order on one line, each finding that is not with all that is known of it."""
    out = console()
    for area in Area:
        results = [result for result in found.results if result.area is area and result.findings]
        if results:
            _area(out, area, results, every=every)
    out.print(Text(f"\n{_summary(found)}", style=STYLES[found.level]))


def _area(out: Console, area: Area, results: list[Result], *, every: bool) -> None:
    findings = [one for result in results for one in result.findings]
    level = worst(findings)
    told = "; ".join(f"{result.findings[0].subject} {result.findings[0].message}" for result in results)
    counts = ", ".join(_counts(findings, (Level.ERROR, Level.WARNING, Level.UNKNOWN)))
    say(out, counts or told, head=Text.assemble((f"{level:<8} ", STYLES[level]), (f"{area:<9} ", "bold")))
    for one in findings:
        if every or one.level is not Level.OK:
            out.print()
            for line in finding(one, out.width):
                out.print(line, soft_wrap=True)
    if every or level is not Level.OK:
        out.print()


def finding(one: Finding, width: int) -> Iterator[Text]:
    """Yield the lines that say all of a finding; those of the fix are never broken, as they may be commands."""
    level, code = Text.assemble((f"  {one.level:<8}", STYLES[one.level])), f"{one.code}: " if one.code else ""
    for number, text in enumerate(paragraph(f"{code}{one.subject} {one.message}", width, head=level)):
        if number == 0:
            text.stylize("bold", len(level), len(level) + len(code))
        yield text
    for thing in one.seen:
        yield from paragraph(f"{thing.path}: {thing.value}", width, head=Text.assemble(INDENT, ("seen: ", "dim")))
    if one.why is not None:
        yield from paragraph(one.why, width, head=Text.assemble(INDENT, ("why:  ", "dim")))
    for index, line in enumerate(one.fix):
        yield Text.assemble(INDENT, ("fix:  " if index == 0 else "      ", "dim"), printable(line))


def way(found: Way) -> None:
    """Write a way: a line for each stage, then what blocks it."""
    out = console()
    head = " ".join(one for one in (found.device, f"as {found.resource}" if found.resource else None) if one)
    out.print(Text(printable(head or found.target), style="bold"))
    reached = [stage for stage in found.stages if stage.message != NOT_REACHED]
    for stage in reached:
        standing = (f"  {stage.standing:<8} ", WAY_STYLES[stage.standing])
        say(out, stage.message, head=Text.assemble(standing, f"{stage.step:<12} "))
    if later := [stage.step for stage in found.stages if stage not in reached]:
        say(out, ", ".join(later), head=Text("  then     ", style="dim"), style="dim")
    out.print()
    if found.blocker is None:
        out.print(Text("A virtual machine can have it now.", style="green"))
    else:
        out.print(Text("This is what is in its way:", style="bold red"))
        for line in finding(found.blocker, out.width):
            out.print(line, soft_wrap=True)
    if found.invalid:
        out.print(Text("\nThe node's desired state is invalid, and changes nothing:", style="bold red"))
    for one in found.invalid:
        for line in finding(one, out.width):
            out.print(line, soft_wrap=True)


def _summary(found: Report) -> str:
    findings = [one for result in found.results for one in result.findings]
    if found.level is Level.OK:
        return f"All is in order ({len(findings)} findings of {len(found.results)} checks; --all shows them)."
    return f"{', '.join(_counts(findings, (Level.ERROR, Level.WARNING, Level.UNKNOWN, Level.OK)))}."


def _counts(findings: Iterable[Finding], levels: Iterable[Level]) -> Iterator[str]:
    findings = list(findings)
    for level in levels:
        if count := sum(one.level is level for one in findings):
            plural = f"{level}s" if count > 1 and level in {Level.ERROR, Level.WARNING} else str(level)
            yield f"{count} {plural}"

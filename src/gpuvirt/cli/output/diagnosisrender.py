"""The text output of `gpuvirt doctor` and `gpuvirt why`."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from gpuvirt.cli.output.tables import console, paragraph, printable, say
from gpuvirt.diagnosis.explanation import NOT_REACHED, DeviceExplanation, DeviceStage, StageOutcome
from gpuvirt.diagnosis.findings import Area, CheckResult, Finding, Report, worst
from gpuvirt.diagnosis.vms.vmexplanation import VmStage
from gpuvirt.model.reasons.codes import Level

STYLES = {Level.OK: "green", Level.UNKNOWN: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
EXPLANATION_STYLES = {StageOutcome.OK: "green", StageOutcome.BLOCKED: "bold red", StageOutcome.SKIPPED: "dim"}
INDENT = " " * 9
"""The indent of the lines below a finding's first line: the width of its level."""


def report(found: Report, *, every: bool) -> None:
    """Print a report: one line for an area that is ok, all fields of each finding that is not."""
    out = console()
    for area in Area:
        results = [result for result in found.results if result.area is area and result.findings]
        if results:
            _area(out, area, results, every=every)
    out.print(Text(f"\n{_summary(found)}", style=STYLES[found.level]))


def _area(out: Console, area: Area, results: list[CheckResult], *, every: bool) -> None:
    findings = [finding for result in results for finding in result.findings]
    level = worst(findings)
    messages = "; ".join(f"{result.findings[0].subject} {result.findings[0].message}" for result in results)
    counts = ", ".join(_counts(findings, (Level.ERROR, Level.WARNING, Level.UNKNOWN)))
    say(out, counts or messages, head=Text.assemble((f"{level:<8} ", STYLES[level]), (f"{area:<9} ", "bold")))
    for finding in findings:
        if every or finding.level is not Level.OK:
            out.print()
            print_finding(out, finding)
    if every or level is not Level.OK:
        out.print()


def print_finding(out: Console, finding: Finding) -> None:
    """Print all fields of a finding; lines of the fix are never broken, as they may be commands."""
    for line in _lines(finding, out.width):
        out.print(line, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    level = Text.assemble((f"  {finding.level:<8}", STYLES[finding.level]))
    code = f"{finding.code}: " if finding.code else ""
    for number, text in enumerate(paragraph(f"{code}{finding.subject} {finding.message}", width, head=level)):
        if number == 0:
            text.stylize("bold", len(level), len(level) + len(code))
        yield text
    for place in finding.seen:
        found = f"{place.path}: {place.value}" if place.path else place.value
        yield from paragraph(found, width, head=Text.assemble(INDENT, ("seen: ", "dim")))
    if finding.why is not None:
        yield from paragraph(finding.why, width, head=Text.assemble(INDENT, ("why:  ", "dim")))
    for index, line in enumerate(finding.fix):
        yield Text.assemble(INDENT, ("fix:  " if index == 0 else "      ", "dim"), printable(line))


def explanation(found: DeviceExplanation) -> None:
    """Print the stages of a device, then the finding that blocks it."""
    out = console()
    head = " ".join(text for text in (found.device, f"as {found.resource}" if found.resource else None) if text)
    out.print(Text(printable(head or found.target), style="bold"))
    print_stages(out, found.stages, width=12)
    out.print()
    if found.blocker is None:
        out.print(Text("A VM can get this device now.", style="green"))
    else:
        print_blocker(out, found.blocker)
    if found.invalid:
        out.print(Text("\nInvalid desired state of this node, which gpuvirt does not apply:", style="bold red"))
    for finding in found.invalid:
        print_finding(out, finding)


def print_stages(out: Console, stages: Sequence[DeviceStage | VmStage], *, width: int) -> None:
    """Print a line for each stage that was reached, then the names of the others; `width` is that of the names."""
    reached = [stage for stage in stages if stage.message != NOT_REACHED]
    for stage in reached:
        standing = (f"  {stage.standing:<8} ", EXPLANATION_STYLES[stage.standing])
        say(out, stage.message, head=Text.assemble(standing, f"{stage.step:<{width}} "))
    if later := [stage.step for stage in stages if stage not in reached]:
        say(out, ", ".join(later), head=Text("  then     ", style="dim"), style="dim")


def print_blocker(out: Console, blocker: Finding) -> None:
    """Print the finding that blocks a device, a VM or a pod."""
    out.print(Text("Blocked by:", style="bold red"))
    print_finding(out, blocker)


def _summary(found: Report) -> str:
    findings = [finding for result in found.results for finding in result.findings]
    if found.level is Level.OK:
        return f"All checks are ok ({len(findings)} findings of {len(found.results)} checks; --all shows them)."
    return f"{', '.join(_counts(findings, (Level.ERROR, Level.WARNING, Level.UNKNOWN, Level.OK)))}."


def _counts(findings: Iterable[Finding], levels: Iterable[Level]) -> Iterator[str]:
    findings = list(findings)
    for level in levels:
        if count := sum(finding.level is level for finding in findings):
            plural = f"{level}s" if count > 1 and level in {Level.ERROR, Level.WARNING} else str(level)
            yield f"{count} {plural}"

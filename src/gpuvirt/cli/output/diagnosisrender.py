"""The text output of `gpuvirt doctor` and `gpuvirt why`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from gpuvirt.cli.output.tables import UNBOUNDED, console, paragraph, printable, say, terminal_height
from gpuvirt.diagnosis.explanation import NOT_REACHED, DeviceExplanation, DeviceStage, StageOutcome
from gpuvirt.diagnosis.findings import GRAVITY, Area, Finding, Report
from gpuvirt.diagnosis.vms.vmexplanation import VmStage
from gpuvirt.model.offers.ondemand.typesannotation import with_type
from gpuvirt.model.reasons import count_of
from gpuvirt.model.reasons.codes import Level

STYLES = {Level.OK: "green", Level.UNKNOWN: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
EXPLANATION_STYLES = {StageOutcome.OK: "green", StageOutcome.BLOCKED: "bold red", StageOutcome.SKIPPED: "dim"}
INDENT = " " * 9
"""The indent of the lines below a finding's first line: the width of its level."""
BELOW_FINDINGS = 2
"""The rows of a screen for the last line and the shell's prompt."""


def report(found: Report, *, every: bool) -> None:
    """Print the verdict, then the findings that are not ok, the most harmful first; with `every`, all findings.

    On a terminal the findings fit one screen: those without room in full are printed without evidence and fix.
    """
    out = console()
    findings = [finding for result in found.results for finding in result.findings]
    verdict = list(paragraph(Text(_verdict(found, findings), style=STYLES[found.level]), out.width))
    out.print(Text("\n").join(verdict), soft_wrap=True)
    _print_fitting(out, by_harm(findings), UNBOUNDED if every else terminal_height() - len(verdict) - BELOW_FINDINGS)
    for area in Area if every else ():
        results = [result for result in found.results if result.area is area]
        if fine := [finding for result in results for finding in result.findings if finding.level is Level.OK]:
            out.print(Text(f"\n{area}", style="bold"))
            for finding in fine:
                print_finding(out, finding)


def by_harm(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are not ok: the gravest first; of one level each code once, then those of further GPUs.

    Findings are otherwise in the order of the checks: firmware first, since what comes later follows from it.
    """
    number: Counter[str | None] = Counter()
    ranked: list[tuple[int, int, Finding]] = []
    for finding in findings:
        if finding.level is not Level.OK:
            ranked.append((-GRAVITY.index(finding.level), number[finding.code], finding))
            number[finding.code] += 1
    return [finding for _, _, finding in sorted(ranked, key=lambda entry: entry[:2])]


def _print_fitting(out: Console, findings: Sequence[Finding], rows: int) -> None:
    """Print findings on the rows of a screen, the first in full; say how to see what has no room."""
    is_full, hidden = True, 0
    for number, finding in enumerate(findings):
        lines = [Text(), *_lines(finding, out.width)]
        if is_full and number and _rows(lines, out.width) > rows - (number < len(findings) - 1):
            is_full = False
            out.print()
            rows -= 1
        if not is_full:
            lines = list(_head(finding, out.width))
        if number and len(lines) > rows:
            hidden = len(findings) - number
            break
        out.print(Text("\n").join(lines), soft_wrap=True)
        rows -= _rows(lines, out.width)
    if not is_full:
        more = f"{hidden} more, and " if hidden else ""
        out.print(Text(f"{more}evidence and fix of each: gpuvirt doctor --all", style="dim"))


def _rows(lines: Iterable[Text], width: int) -> int:
    """Return the rows of a terminal that lines take, which it wraps."""
    return sum(max(1, -(-line.cell_len // width)) for line in lines)


def print_finding(out: Console, finding: Finding) -> None:
    """Print all fields of a finding; lines of the fix are never broken, as they may be commands."""
    for line in _lines(finding, out.width):
        out.print(line, soft_wrap=True)


def _head(finding: Finding, width: int) -> Iterator[Text]:
    level = Text.assemble((f"  {finding.level:<8}", STYLES[finding.level]))
    code = f"{finding.code}: " if finding.code else ""
    for number, text in enumerate(paragraph(f"{code}{finding.subject} {finding.message}", width, head=level)):
        if number == 0:
            text.stylize("bold", len(level), len(level) + len(code))
        yield text


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    yield from _head(finding, width)
    for place in finding.seen:
        found = f"{place.path}: {place.value}" if place.path else place.value
        yield from paragraph(found, width, head=Text.assemble(INDENT, ("seen: ", "dim")))
    if finding.why is not None:
        yield from paragraph(finding.why, width, head=Text.assemble(INDENT, ("why:  ", "dim")))
    for index, line in enumerate(finding.fix):
        yield Text.assemble(INDENT, ("fix:  " if index == 0 else "      ", "dim"), printable(line))


def explanation(found: DeviceExplanation) -> None:
    """Print the finding that blocks a device, then its stages."""
    out, blocker = console(), found.blocker
    resource = found.resource and with_type(found.resource, found.resource_type)
    device = " as ".join(filter(None, (found.device, resource))) or found.target
    if blocker is None:
        now = "a pod gets a vGPU of it when it starts" if found.on_demand else "a VM can get this device now"
        say(out, f"{device}: {now}.", style="green")
    else:
        say(out, f"{device}: blocked by {blocker.code}", style="bold red")
        print_finding(out, blocker)
    out.print()
    print_stages(out, found.stages, width=12)
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
    """Print the finding that blocks a VM or a pod."""
    out.print(Text("Blocked by:", style="bold red"))
    print_finding(out, blocker)


def _verdict(found: Report, findings: Sequence[Finding]) -> str:
    """Return the number of findings of each level, and their codes, the most harmful first."""
    if found.level is Level.OK:
        number = count_of(len(findings), "finding")
        gpus = next(finding for result in found.results if result.check == "devices" for finding in result.findings)
        of_checks = f"All checks are ok ({number} of {len(found.results)} checks; --all shows them)."
        return f"{of_checks} {gpus.subject} {gpus.message}."
    counts = ", ".join(_counts(findings, (Level.ERROR, Level.WARNING, Level.UNKNOWN)))
    return f"{counts}: {', '.join(dict.fromkeys(str(finding.code) for finding in by_harm(findings)))}"


def _counts(findings: Iterable[Finding], levels: Iterable[Level]) -> Iterator[str]:
    findings = list(findings)
    for level in levels:
        if count := sum(finding.level is level for finding in findings):
            yield count_of(count, level) if level in {Level.ERROR, Level.WARNING} else f"{count} {level}"

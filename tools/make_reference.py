"""Writes the tables of codes in docs/reference; with --check, reports whether they differ from the catalogue."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpuvirt.model.offers.offers import DEBOUNCE, Debounce
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Code, Topic

PAGES = tuple(Path(__file__).parent.parent / "docs/reference" / name for name in ("reasons.md", "findings.md"))
BLOCK = re.compile(r"(<!-- codes: (?P<topic>[a-z ]+) -->\n).*?(<!-- end of codes -->)", re.DOTALL)
CODES: tuple[Code, ...] = (*ReasonCode, *FindingCode)


def table(topic: Topic) -> Iterator[str]:
    """Yield the lines of one topic's table, and in place of a column of levels the level that all codes have."""
    codes = [code for code in CODES if code.topic is topic]
    levels = {code: f"{code.level}, waits" if code.passes else str(code.level) for code in codes}
    has_one = len(set(levels.values())) == 1
    columns = ["code", *(("seen for", "gone for") if topic is Topic.UNHEALTHY else ()), "level", "meaning"]
    if has_one:
        columns.remove("level")
        yield f"The level of each is `{levels[codes[0]]}`.\n"
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for code in codes:
        times = _times(code) if topic is Topic.UNHEALTHY else ""
        yield f"| `{code}` |{times}{'' if has_one else f' {levels[code]} |'} {code.meaning} |"


def _times(code: Code) -> str:
    debounce = next((debounce for known, debounce in DEBOUNCE.items() if known is code), Debounce())
    return f" {debounce.raise_after_s:g} s | {debounce.clear_after_s:g} s |"


def generated(text: str) -> str:
    """Return a page with the tables of the catalogue's codes."""
    return BLOCK.sub(lambda block: "\n".join((block[1].rstrip(), *table(Topic(block["topic"])), block[3])), text)


def main() -> int:
    """Generate the tables, or compare them."""
    stale = 0
    for page in PAGES:
        before = page.read_text()
        after = generated(before)
        if "--check" not in sys.argv[1:]:
            page.write_text(after)
        elif before != after:
            print(f"{page.name} is not up to date with the catalogue of codes; run make generate", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""Every code is in the catalogue once, in the reference once, and used in the source."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpuvirt.model.offers.offers import DEBOUNCE
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Code, Topic

ROOT = Path(__file__).parent.parent.parent
SOURCES = (ROOT / "src", ROOT / "schedules/src")
CATALOGUE = ROOT / "src/gpuvirt/model/reasons"
CODES: tuple[Code, ...] = (*ReasonCode, *FindingCode)
USED = frozenset(
    name
    for folder in SOURCES
    for path in folder.rglob("*.py")
    if path not in {CATALOGUE / "reasoncodes.py", CATALOGUE / "findingcodes.py"}
    for name in re.findall(r"\b(?:Reason|Finding)Code\.[A-Z_]+", path.read_text())
)
REFERENCE = "".join(
    (ROOT / "docs/reference" / name).read_text() for name in ("reasons.md", "findings.md", "settings.md")
)
ROWS = Counter(re.findall(r"^\| `([A-Za-z]+)` \|", REFERENCE, re.MULTILINE))


def test_codes_are_unique() -> None:
    assert len({str(code) for code in CODES}) == len(CODES)


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_used_and_has_one_row_in_the_reference(code: Code) -> None:
    assert f"{type(code).__name__}.{code.name}" in USED
    assert ROWS[code] == (2 if code is ReasonCode.SIZES_DIFFER else 1), "SizesDiffer is a note on a vGPU config, too"
    assert code.meaning
    assert not code.meaning.endswith(".")


def test_every_topic_has_its_table() -> None:
    assert re.findall(r"<!-- codes: ([a-z ]+) -->", REFERENCE) == [str(topic) for topic in Topic]


def test_the_tables_are_generated() -> None:
    check = [sys.executable, "tools/make_reference.py", "--check"]
    assert subprocess.run(check, cwd=ROOT, check=False).returncode == 0


def test_only_codes_of_unhealthy_devices_are_debounced() -> None:
    assert {code.topic for code in DEBOUNCE} == {Topic.UNHEALTHY}

"""docs/prerequisites.md names checks that exist, and each host without a prerequisite shows the code that it names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuvirt.model.reasons import FindingCode, ReasonCode
from tests.diagnosis.doctor.badhosts import BAD

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/prerequisites.md").read_text()
HOST = {"Host", "Host for vGPUs"}


def checks() -> Iterator[tuple[str, str]]:
    """Yield the section and each code of the last column of the tables."""
    section = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|"):
            last = line.rstrip("| ").rpartition("|")[2]
            yield from ((section, code) for code in re.findall(r"`([A-Z][A-Za-z]+)`", last))


def test_the_page_names_only_codes_that_exist() -> None:
    found = list(checks())
    known = {code.value for kind in (FindingCode, ReasonCode) for code in kind}
    assert len(found) > 20
    assert {code for _, code in found} - known == set()


@pytest.mark.parametrize("code", sorted({code for section, code in checks() if section in HOST}))
def test_a_host_that_lacks_a_prerequisite_shows_its_code(code: str) -> None:
    elsewhere = {"IommufdMissing"}
    assert code in {bad.code.value for bad in BAD.values()} | elsewhere


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "docs/install.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "prerequisites.md" in (ROOT / page).read_text()

"""Every link of the documents leads to a file of the repository, and to a heading that it has."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LISTED = subprocess.run(
    ["/usr/bin/env", "git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
)
PAGES = sorted(LISTED.stdout.split())
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 1
        while anchor in found:
            anchor, number = f"{anchor.removesuffix(f'-{number - 1}')}-{number}", number + 1
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE))
    broken = []
    for name, anchor in LINK.findall(text):
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
            broken.append(f"{name}#{anchor}" if anchor else name)
    assert broken == []


NAMED = re.compile(r"`((?:tests|tools|src|schedules|simulator|lab|bench|deploy|examples)/[\w/.-]+)`")
"""A file or folder of the repository, which a text names."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    assert [name for name in NAMED.findall((ROOT / page).read_text()) if not (ROOT / name).exists()] == []

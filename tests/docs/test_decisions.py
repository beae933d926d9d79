"""The decisions: each page has one, the index has each page, and no text names one by a number."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs/decisions").glob("*.md"))
MOST_WORDS = 350
NUMBERED = re.compile(r"\b[Dd]ecisions?\s+(?:[#*]\s+)?\(?\d|\bdecisions(?:/[\w-]+)?\.md[#\s]+\d")


def test_the_index_has_each_page_once_under_its_title() -> None:
    index = (ROOT / "docs/decisions.md").read_text()
    listed = re.findall(r"^- \[(.+)\]\(decisions/([\w-]+)\.md\)$", index, re.MULTILINE)
    titles = [(page.read_text().partition("\n")[0].removeprefix("# "), page.stem) for page in PAGES]
    assert sorted(listed) == sorted(titles)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_idea(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS
    assert re.findall(r"^#+ ", text, re.MULTILINE) == ["# "]


def test_no_text_names_a_decision_by_a_number() -> None:
    kinds = ("*.md", "*.py", "*.toml", "*.yaml", "*.tpl", "*.sh", "Makefile", "*Dockerfile")
    command = ["/usr/bin/env", "git", "ls-files", *kinds]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {path: (ROOT / path).read_text() for path in listed if (ROOT / path).is_file()}
    named = [f"{path}: {found[0]}" for path, text in texts.items() for found in NUMBERED.finditer(text)]
    assert named == []

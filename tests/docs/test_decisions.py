"""The decisions: each has a number of its own, and the index says on which page it is."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted((DOCS / "decisions").glob("*.md"))


def on_page(page: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^## (\d+)$", page.read_text(), re.MULTILINE)]


def test_the_index_has_each_decision_once() -> None:
    index = (DOCS / "decisions.md").read_text()
    listed = re.findall(r"\[(\d+)\]\(decisions/([\w-]+)\.md#(\d+)\)", index)
    assert all(number == anchor for number, _, anchor in listed)
    on_pages = [(number, page.stem) for page in PAGES for number in on_page(page)]
    assert sorted((int(number), page) for number, page, _ in listed) == sorted(on_pages)
    numbers = [number for number, _ in on_pages]
    assert len(numbers) == len(set(numbers)), "two decisions have one number"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_newest_decision_of_a_page_is_its_last(page: Path) -> None:
    numbers = on_page(page)
    assert numbers
    assert all(first < second for first, second in pairwise(numbers))


def test_decisions_that_code_and_texts_name_exist() -> None:
    root = DOCS.parent
    known = {number for page in PAGES for number in on_page(page)}
    folders = ("src", "schedules", "tools", "lab", "bench", "docs")
    paths = [path for folder in folders for path in (root / folder).rglob("*.*")]
    texts = (path.read_text() for path in paths if path.suffix in {".py", ".md"})
    named = {int(number) for text in texts for number in re.findall(r"[Dd]ecision (\d+)", text)}
    assert named <= known, sorted(named - known)

"""The newcomer's map in CONTRIBUTING.md: its files exist, and no way is longer than a person reads in a day."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to begin")[2].partition("\n## ")[0]
ITEMS = re.findall(r"- \*\*(.*?)\*\*:(.*?)(?=\n- |\Z)", MAP, re.DOTALL)
WAYS = {what: re.findall(r"`([\w/]+\.py)`", files) for what, files in ITEMS}
MOST_FILES = 25


@pytest.mark.parametrize("what", WAYS)
def test_each_file_on_the_map_exists(what: str) -> None:
    files = WAYS[what]
    assert 5 <= len(files) <= MOST_FILES
    assert len(set(files)) == len(files)
    for file in files:
        sources = "schedules/src" if file.startswith("gpuvirt_schedules/") else "src/gpuvirt"
        assert (ROOT / sources / file).is_file(), file


def test_the_map_answers_ten_questions() -> None:
    assert len(WAYS) >= 10

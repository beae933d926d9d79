"""The files that a label and an Allocate pass in the agent are within the budget."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([^|]+?) \| (\d+) \|", re.MULTILINE)


def test_no_way_passes_more_files_than_its_budget() -> None:
    # In a process of its own: what another test has cached would call fewer functions.
    printed = subprocess.run(
        [sys.executable, "-m", "bench.road"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = {what: int(count) for what, count in ROW.findall(printed)}
    budget = tomllib.loads((ROOT / "budget.toml").read_text())["roads"]
    assert files.keys() == budget.keys()
    assert {what: count for what, count in files.items() if count > budget[what]} == {}

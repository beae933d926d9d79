"""The files that a label and an Allocate pass in the agent are within the budget."""

import tomllib
from pathlib import Path

from bench.road import roads

BUDGET = Path(__file__).parents[2] / "budget.toml"


def test_no_way_passes_more_files_than_its_budget() -> None:
    files = {what: len(road.files) for what, road in roads().items()}
    budget = tomllib.loads(BUDGET.read_text())["roads"]
    assert files.keys() == budget.keys()
    assert {what: count for what, count in files.items() if count > budget[what]} == {}

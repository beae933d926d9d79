"""The lint rule of sizes notices a room that has grown beyond its budget, and one without a budget."""

import runpy
from pathlib import Path

import pytest

RULE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/check_budget.py"))
SIZES = {"agent": {"lines": 10, "modules": 2, "largest": 6}, "docs": {"words": 5}}


def test_a_house_within_its_budget_has_no_fault() -> None:
    assert list(RULE["find_faults"](SIZES, SIZES)) == []
    assert list(RULE["find_faults"]({**SIZES, "docs": {"words": 50}}, SIZES)) == []


@pytest.mark.parametrize(
    ("budget", "fault"),
    [
        ({**SIZES, "docs": {"words": 4}}, "docs.words: 5, and the budget is 4"),
        ({**SIZES, "agent": {"lines": 10, "modules": 2}}, "agent.largest: has no budget"),
        ({**SIZES, "agent": {**SIZES["agent"], "lines": 9}}, "agent.lines: 10, and the budget is 9"),
        ({**SIZES, "node": {"lines": 1}}, "node.lines: there is none any more"),
    ],
)
def test_growth_and_missing_budgets_are_faults(budget: dict[str, dict[str, int]], fault: str) -> None:
    (found,) = RULE["find_faults"](budget, SIZES)
    assert found.startswith(fault)


def test_every_room_is_measured() -> None:
    rooms = RULE["rooms"]()
    assert {"agent", "base", "controller", "extender", "gpuvirt_schedules", "model", "webhook"} <= rooms.keys()
    assert all(size > 0 for sizes in rooms.values() for size in sizes.values())

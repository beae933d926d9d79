"""`make bench` as a user runs it: it measures, and prints only its table."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.results import Results

pytestmark = pytest.mark.timeout(900)  # many processes one after another, on a busy computer

ROOT = Path(__file__).parents[2]
BENCH = [sys.executable, "-m", "bench"]


def rows(*arguments: str) -> dict[str, list[str]]:
    """Run the bench; return the cells of its table by the first of each row."""
    done = subprocess.run([*BENCH, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    assert all((line[0], line[-1]) == ("", "") and len(line) == len(lines[0]) for line in lines)
    return {line[1]: line[2:-1] for line in lines}


def test_the_agent_is_measured_beside_the_floor_and_another_checkout() -> None:
    arguments = ["--only", "plugin", "--starts", "2", "--rounds", "1", "--calls", "20", "--idle", "0.1"]
    table = rows(*arguments, "--checkout", str(ROOT))
    assert table.pop("") == ["gpuvirt", "floor", "gpuvirt / floor", "checkout", "gpuvirt / checkout"]
    assert {"start to 2 GPUs registered, s", "Allocate of 1, p50, us", "Allocate of 8, p99, us"} < table.keys()
    for what in ("start to 2 GPUs registered, s", "Allocate of 1, p50, us", "PSS idle with 8 GPUs, MB"):
        ours, floor, ratio, *_ = (float(cell.replace(",", "")) for cell in table[what])
        assert ratio == pytest.approx(ours / floor, rel=0.02)


def test_only_the_table_is_printed_when_an_agent_creates_vgpus() -> None:
    table = rows("--only", "labels", "--rounds", "1")
    assert table.pop("") == ["gpuvirt"]
    assert {cells[0] for cells in table.values()} - {""}


def test_a_plugin_that_ends_is_shown_with_its_log() -> None:
    arguments = ["--only", "plugin", "--starts", "1", "--rounds", "1", "--agent-options=--no-such-option"]
    done = subprocess.run([*BENCH, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No such option: --no-such-option" in done.stderr
    assert not done.stdout


def test_a_missing_figure_leaves_its_cells_empty() -> None:
    results = Results()
    results.add("a", "start, s", 0.25)
    results.add("b", "start, s", 0.125)
    results.add("a", "made, s", 1234.5)
    assert results.table(["a", "b", "c"]).splitlines() == [
        "|  | a | b | a / b |",
        "| --- | --- | --- | --- |",
        "| start, s | 0.25 | 0.125 | 2.00 |",
        "| made, s | 1,234 |  |  |",
    ]

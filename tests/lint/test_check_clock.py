"""`make lint` finds each new reader of the wall clock."""

import subprocess
import sys
from pathlib import Path

import pytest


def faults(*arguments: str) -> list[str]:
    tool = Path(__file__).parents[2] / "tools/check_clock.py"
    done = subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "at = self._site.clock.now()",
        "at = RealClock().now()",
        "from datetime import datetime",
        "from datetime import timedelta as delta",
        "from time import time",
        "age = path.stat().st_mtime",
        "age = datetime.timestamp(at)",
        "at = time.time_ns()",
    ],
)
def test_a_reader_of_the_wall_clock_is_a_fault(tmp_path: Path, line: str) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node/new.py").write_text(f"x = 1\n{line}\n")
    assert [fault.partition(" ")[0] for fault in faults(str(tmp_path))] == ["node/new.py:2:"]


@pytest.mark.parametrize(
    "line",
    ["at_s = clock.monotonic_s()", "found = self._unfinished.now(entries, recorded)", "from time import monotonic"],
)
def test_monotonic_times_are_no_fault(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(f"{line}\n")
    assert faults(str(tmp_path)) == []


def test_the_package_passes() -> None:
    assert faults() == []

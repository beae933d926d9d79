"""`make lint` finds each new reader of the wall clock."""

from pathlib import Path

import pytest

from tests.lint.checkers import faults


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
    assert [fault.partition(" ")[0] for fault in faults("check_clock", str(tmp_path))] == ["node/new.py:2:"]


@pytest.mark.parametrize(
    "line",
    ["at_s = clock.monotonic_s()", "found = self._unfinished.now(entries, recorded)", "from time import monotonic"],
)
def test_monotonic_times_are_no_fault(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(f"{line}\n")
    assert faults("check_clock", str(tmp_path)) == []


def test_the_package_passes() -> None:
    assert faults("check_clock") == []

"""The seconds of folders are those of all phases of their tests."""

import pytest

from tests.durations import seconds_by_folder


def report(nodeid: str, duration_s: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, (nodeid, 0, nodeid), {}, "passed", None, when="call", duration=duration_s)


def test_phases_and_tests_of_a_folder_count_together() -> None:
    reports = [
        report("tests/mount/test_a.py::test_one[/dev/vfio]", 8.0),
        report("tests/mount/test_a.py::test_one[/dev/vfio]", 4.0),
        report("tests/cluster/test_b.py::test_two", 30.0),
        report("tests/cluster/test_c.py::test_three", 5.0),
        report("tests/docs/test_d.py::test_four", 9.0),
        "a report of a collection",
    ]
    assert seconds_by_folder(reports) == [("tests/cluster", 35.0, 2), ("tests/mount", 12.0, 1)]

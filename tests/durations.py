"""How long the tests of each folder took together, for the summary of a run that reports durations."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

LEAST_S = 10.0
"""Folders that took less are not listed."""


def seconds_by_folder(reports: Iterable[object]) -> list[tuple[str, float, int]]:
    """Return the folders, the longest first: each with the seconds of its tests, fixtures included, and their number.

    Tests that run at the same time count both, so the sum is more than the run took.
    """
    seconds, tests = defaultdict[str, float](float), defaultdict[str, set[str]](set)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.partition("::")[0].rpartition("/")[0]
            seconds[folder] += report.duration
            tests[folder].add(report.nodeid)
    found = [(folder, taken_s, len(tests[folder])) for folder, taken_s in seconds.items() if taken_s >= LEAST_S]
    return sorted(found, key=lambda row: -row[1])

"""A pytest plugin that records which tests execute each guard.

It runs in each worker of xdist, and each adds a file to the folder of `--reach`. Only tests that pass count.
"""

import json
import os
from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import pytest

from tests.removals.guards import modules, runs_in_child, source_of
from tests.removals.patching import Functions, mark

OPTION = "--reach"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the folder."""
    parser.addoption(OPTION, help="the folder for the records of which tests execute each guard")


def pytest_configure(config: pytest.Config) -> None:
    """Record where tests run, but not in the process that only distributes them."""
    folder = config.getoption(OPTION)
    if folder is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(Path(str(folder))))


class Recorder:
    """Records the guards that each test executes, by their keys, with the duration of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reached: set[str] = set()
        self._duration_s = 0.0
        self._has_failed = False
        self._found: dict[str, tuple[float, list[str]]] = {}

    def pytest_collection_finish(self) -> None:
        """Mark all sites of the modules, but of those that another process executes."""
        names = [name for name in modules() if not runs_in_child(name)]
        for name in names:  # agents and commands load some of them late
            import_module(name)
        functions = Functions(frozenset(str(source_of(name)) for name in names))
        for name in names:
            mark(functions, name, self._reached)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record one test."""
        self._reached.clear()
        self._duration_s, self._has_failed = 0.0, False
        result = yield
        if self._reached and not self._has_failed:
            self._found[item.nodeid] = self._duration_s, sorted(self._reached)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a phase of a test."""
        self._duration_s += report.duration
        self._has_failed |= report.failed

    def pytest_sessionfinish(self) -> None:
        """Write the records of this process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self._found))

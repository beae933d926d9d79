"""A pytest plugin that removes one guard after another, and runs tests until one of them fails.

Each removal has a process of its own, forked after the tests are collected, so that it costs the time of its tests
alone. The process can't wait for ever: its time on the CPU is limited, and pytest's timeout ends a test that sleeps.
"""

import gc
import json
import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests.removals.guards import Removal, modules, removals, source_of
from tests.removals.patching import Functions, NotReplaceableError, remove

TRIALS, RESULTS = "--trials", "--results"
MOST_CPU_S = 60
"""How long the tests of one removal may run on the CPU; a loop without an end counts as noticed."""
ENDLESS = "no end"
"""The killer of a removal without which the code runs for ever, or dies."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The tests that may notice a removal, the most promising first."""

    key: str
    tests: tuple[str, ...]


def write_trials(path: Path, trials: Iterable[Trial]) -> None:
    """Write trials to the file of `--trials`."""
    path.write_text(json.dumps([[trial.key, trial.tests] for trial in trials]))


def read_results(path: Path) -> dict[str, str]:
    """Return the test that has noticed each removal, "" for a removal that no test noticed."""
    found: dict[str, str] = dict(json.loads(line) for line in path.read_text().splitlines())
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options with the files."""
    parser.addoption(TRIALS, help="the file with the removals, and the tests that may notice each")
    parser.addoption(RESULTS, help="the file that gets the test that has noticed each removal")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Make the trials instead of running the tests."""
    trials, results = session.config.getoption(TRIALS), session.config.getoption(RESULTS)
    if trials is None:
        return None
    known, items = removals(), {item.nodeid: item for item in session.items}
    functions = Functions(frozenset(str(source_of(name)) for name in modules()))
    gc.collect()
    passed, broken = set[str](), set[str]()
    gc.freeze()  # the pages stay shared with the processes of the trials
    with Path(str(results)).open("a") as file:
        for key, tests in json.loads(Path(str(trials)).read_text()):
            found = [items[test] for test in tests if test in items and test not in broken]
            while (killer := _noticed_by(functions, known[key], found)) in items and not _passes(items[killer], passed):
                broken.add(killer)
                found = [item for item in found if item.nodeid != killer]
            file.write(json.dumps([key, killer]) + "\n")
            file.flush()
    return True


def _passes(item: pytest.Item, passed: set[str]) -> bool:
    """Return whether a test passes while no guard is removed; otherwise its failure proves nothing."""
    if item.nodeid not in passed and not _noticed_by(None, None, [item]):
        passed.add(item.nodeid)
    return item.nodeid in passed


def _noticed_by(functions: Functions | None, removal: Removal | None, items: Sequence[pytest.Item]) -> str:
    """Return the first of these tests that fails, "" if none does; without a removal the code is unchanged."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        _try(functions, removal, items, sender)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    match os.waitstatus_to_exitcode(status):
        case 0:
            return output
        case code if code < 0:
            return ENDLESS
        case _:
            raise RuntimeError(f"{removal}: {output}")


def _try(functions: Functions | None, removal: Removal | None, items: Sequence[pytest.Item], sender: int) -> NoReturn:
    """Remove a guard from this process, run tests, report the first that fails, and exit."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if functions is not None and removal is not None:
            remove(functions, removal)
        os.write(sender, next((item.nodeid for item in items if _fails(item)), "").encode())
        code = 0
    except NotReplaceableError as error:
        os.write(sender, str(error).encode())
    except BaseException as error:  # noqa: BLE001  the process must end here
        os.write(sender, repr(error).encode())
    finally:
        os._exit(code)


def _fails(item: pytest.Item) -> bool:
    reports = runtestprotocol(item, nextitem=None, log=False)
    return any(report.failed for report in reports)

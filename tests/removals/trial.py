"""A pytest plugin that removes one guard after another, and runs tests until one of them fails.

Each removal has a process of its own, forked after the tests are collected, so that it costs the time of its tests
alone. The process can't wait for ever: the time of each test on the CPU is limited, and pytest's timeout ends a test
that sleeps.
"""

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

from gpuvirt_schedules.hypervisors import childprocess
from tests.removals.guards import Removal, modules, removals, ring_of, runs_in_child, source_of
from tests.removals.patching import Functions, remove

TRIALS, RESULTS, CPU = "--trials", "--results", "--most-cpu-s"
MOST_CPU_S = 60
"""How long each test may run on the CPU while a guard is removed. A loop without an end counts as noticed."""
FAILED = "failed"


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
    parser.addoption(CPU, type=int, default=MOST_CPU_S, help="how many seconds each test may run on the CPU")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Make the trials instead of running the tests."""
    trials, results = session.config.getoption(TRIALS), session.config.getoption(RESULTS)
    if trials is None:
        return None
    trying = _Trying({item.nodeid: item for item in session.items}, session.config.getoption(CPU))
    with Path(str(results)).open("a") as file:
        for key, tests in json.loads(Path(str(trials)).read_text()):
            file.write(json.dumps([key, trying.killer_of(key, tests)]) + "\n")
            file.flush()
    return True


class _Trying:
    """The trials of one process."""

    def __init__(self, items: Mapping[str, pytest.Item], most_cpu_s: int) -> None:
        self._items, self._most_cpu_s = items, most_cpu_s
        self._known = removals()
        for name in modules():  # agents and commands load some of them late; `remove` fails for those without a library
            with suppress(ImportError) if ring_of(name) is not None else nullcontext():
                import_module(name)
        self._functions = Functions(frozenset(str(source_of(name)) for name in modules()))
        self._passed, self._broken = set[str](), set[str]()
        gc.collect()
        gc.freeze()  # the pages stay shared with the processes of the trials

    def killer_of(self, key: str, tests: Sequence[str]) -> str:
        """Return the first of these tests that fails without a guard and passes with it, "" if none does."""
        found = [self._items[test] for test in tests if test in self._items and test not in self._broken]
        while (killer := self._noticed_by(self._known[key], found)) and not self._passes(self._items[killer]):
            self._broken.add(killer)
            found = [item for item in found if item.nodeid != killer]
        return killer

    def _passes(self, item: pytest.Item) -> bool:
        """Return whether a test passes while no guard is removed; otherwise its failure proves nothing."""
        if item.nodeid not in self._passed and not self._noticed_by(None, [item]):
            self._passed.add(item.nodeid)
        return item.nodeid in self._passed

    def _noticed_by(self, removal: Removal | None, items: Sequence[pytest.Item]) -> str:
        """Return the first of these tests that fails or does not end, "" if none does; None: the code is unchanged."""
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            _try(self._functions, removal, items, sender, self._most_cpu_s)
        os.close(sender)
        with os.fdopen(receiver) as pipe:
            begun = pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        match os.waitstatus_to_exitcode(status):
            case 0:
                return begun[-2] if begun and begun[-1] == FAILED else ""
            case code if code < 0 and begun:  # the process was killed during the last test that has begun
                return begun[-1]
            case _:
                raise RuntimeError(f"{removal}: {begun}")


def _try(
    functions: Functions, removal: Removal | None, items: Sequence[pytest.Item], sender: int, most_cpu_s: int
) -> NoReturn:
    """Remove a guard from this process, run tests, report each that begins until one fails, and exit."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if removal is not None:
            remove(functions, removal)
            if runs_in_child(removal.module):
                remove_in_child(removal)
        for item in items:
            os.write(sender, f"{item.nodeid}\n".encode())
            most_s = int(process_time()) + 1 + most_cpu_s
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
            if _fails(item):
                os.write(sender, f"{FAILED}\n".encode())
                break
        code = 0
    except BaseException as error:  # noqa: BLE001  the process must end here
        os.write(sender, repr(error).encode())
    finally:
        os._exit(code)


def remove_in_child(removal: Removal) -> None:
    """Start the children of hypervisors' connections without a guard; raise RuntimeError where it can't be removed.

    One that fails would be noticed by each test.
    """
    command = (sys.executable, "-P", str(Path(__file__).with_name("inchild.py")), removal.key)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    childprocess.COMMAND = command


def _fails(item: pytest.Item) -> bool:
    reports = runtestprotocol(item, nextitem=None, log=False)
    return any(report.failed for report in reports)

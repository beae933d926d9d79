"""The second try of tests that failed in `.ci/run`: `python -m tests.secondtry FILE [OPTION]...`.

`pytest --failures-to=FILE` writes the file. Each test runs again, with the options, alone, in a process of its own. If
all pass, the run passes, and both outputs are printed: CONTRIBUTING says what follows. Tests of rule 1 have no second
try, since a race there is a finding.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

RULE_ONE = (
    "tests/agent/binding/test_after_a_crash.py",
    "tests/agent/binding/test_leases.py",
    "tests/agent/change/",
    "tests/contract/",
    "tests/docs/test_proof_rule.py",
    "tests/explore/",
    "tests/agent/life/",
    "tests/agent/node/test_gate_",
    "tests/removals/",
    "tests/schedules/test_exploration.py",
    "tests/agent/vgpu/test_refused_vgpu_steps.py",
)
"""The beginnings of the ids of tests of rule 1: proofs, refused steps, contract bodies, explorers, removed guards."""
PHASES = ("setup", "call", "teardown")
MOST = 5
"""More tests don't fail by chance."""
AGAIN = (sys.executable, "-m", "pytest", "-n0", "-rP")


class Failure(msgspec.Struct, frozen=True):
    """A failed test."""

    nodeid: str
    output: str
    """Its errors, and what it printed and logged."""


def write_failures(file: Path, reports: Sequence[pytest.TestReport | pytest.CollectReport]) -> None:
    """Write the failed tests of a run, unless more has failed: a worker that crashed has left tests out."""
    if not all(isinstance(report, pytest.TestReport) and report.when in PHASES for report in reports):
        return
    outputs: dict[str, list[str]] = defaultdict(list)
    for report in reports:  # a test has two, if its teardown has failed, too
        sections = (f"--- {name} ---\n{text}" for name, text in report.sections)
        outputs[report.nodeid] += [report.longreprtext, *sections]
    failures = [Failure(nodeid, "\n".join(texts)) for nodeid, texts in outputs.items()]
    file.write_bytes(msgspec.json.encode(failures))


def why_none(failures: Sequence[Failure]) -> str | None:
    """Return why these tests have no second try; None where they have one."""
    if not failures:
        return "no test has failed, and the run has (see above)"
    if findings := [failure.nodeid for failure in failures if failure.nodeid.startswith(RULE_ONE)]:
        return f"a race in a test of rule 1 is a finding: {', '.join(findings)}"
    return f"{len(failures)} tests failed, and more than {MOST} don't fail by chance" if len(failures) > MOST else None


def main(file: Path, *options: str) -> int:
    """Try the failed tests of a run again; return the exit code of the run."""
    if not file.exists():
        return _ended("no second try: more has failed than tests (see above)")
    failures = msgspec.json.decode(file.read_bytes(), type=list[Failure])
    if (why := why_none(failures)) is not None:
        return _ended(f"no second try: {why}")
    failed = 0
    for failure in failures:
        done = subprocess.run([*AGAIN, *options, failure.nodeid], capture_output=True, text=True, check=False)
        failed += done.returncode != 0
        print(f"==== {'failed' if done.returncode else 'passed'} on the second try: {failure.nodeid}")
        print(f"==== the first try\n{failure.output}\n==== the second try\n{done.stdout}{done.stderr}", flush=True)
    print(f"second try: {len(failures) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _ended(why: str) -> int:
    print(why)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

"""A test that fails by chance has a second try at the end of `.ci/run`; a finding, or a broken run, has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.secondtry import MOST, RULE_ONE, Failure, why_none

ROOT = Path(__file__).parent.parent
CONFTEST = "from tests.conftest import pytest_addoption, pytest_sessionfinish\n"
CHANCE = """
from pathlib import Path
def test_by_chance():
    Path("ran").open("a").write("x")
    print("this was try", Path("ran").stat().st_size)
    assert Path("ran").stat().st_size > 1
"""
ALWAYS = "def test_that_always_fails():\n    assert not 'a fault'\n"
CRASH = "import os\ndef test_a(): os._exit(1)\ndef test_b(): pass\n"
SKIPPED = "import pytest\ndef test_that_is_skipped():\n    pytest.skip('no ring')\n"
FIXTURE = """
import pytest
from pathlib import Path
@pytest.fixture
def peer():
    yield
    Path("ended").open("a").write("x")
    assert Path("ended").stat().st_size > 1, "the peer has not ended"
def test_with_a_peer(peer): pass
"""


def checked(folder: Path, *workers: str, **tests: str) -> tuple[int, str]:
    """Run tests in a folder as `.ci/run` does; return the exit code and the output of the second try."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "true"}  # noqa: TID251  of the programs below
    failures = folder / "failures.json"
    first = [sys.executable, "-m", "pytest", "--import-mode=importlib", *workers, f"--failures-to={failures}"]
    done = subprocess.run(first, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    command = [sys.executable, "-m", "tests.secondtry", str(failures)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_test_that_passes_on_the_second_try_is_shown_with_both_outputs(tmp_path: Path, workers: str) -> None:
    code, output = checked(tmp_path, workers, chance=CHANCE)
    assert code == 0, output
    assert "passed on the second try: test_chance.py::test_by_chance" in output
    assert output.index("this was try 1") < output.index("==== the second try") < output.index("this was try 2")


def test_a_failed_teardown_has_a_second_try(tmp_path: Path) -> None:
    code, output = checked(tmp_path, fixture=FIXTURE)
    assert code == 0, output
    assert "the peer has not ended" in output


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, output = checked(tmp_path, chance=CHANCE, always=ALWAYS)
    assert code == 1, output
    assert "failed on the second try: test_always.py::test_that_always_fails" in output
    assert "passed on the second try: test_chance.py::test_by_chance" in output


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
@pytest.mark.parametrize("broken", [SKIPPED, "import no_such_module\n"])
def test_a_run_in_which_more_fails_than_tests_has_no_second_try(tmp_path: Path, workers: str, broken: str) -> None:
    code, output = checked(tmp_path, workers, chance=CHANCE, broken=broken)
    assert (code, output) == (1, "no second try: more has failed than tests (see above)\n")


def test_a_worker_that_crashes_leaves_no_second_try(tmp_path: Path) -> None:
    """The tests of the worker may never have run."""
    code, output = checked(tmp_path, "-n1", "--max-worker-restart=0", crash=CRASH)
    assert (code, output) == (1, "no second try: more has failed than tests (see above)\n")


def test_findings_and_broken_changes_have_no_second_try() -> None:
    chance = [Failure(f"tests/cluster/test_a.py::test_{number}", "") for number in range(MOST + 1)]
    assert why_none(chance[:MOST]) is None
    assert "6 tests failed" in str(why_none(chance))
    assert why_none([]) is not None


@pytest.mark.parametrize("beginning", RULE_ONE)
def test_tests_of_rule_1_exist_and_have_no_second_try(beginning: str) -> None:
    tests = ROOT.glob(f"{beginning}*" if "test_" in beginning else f"{beginning}test_*.py")
    found = [str(test.relative_to(ROOT)) for test in tests]
    assert found
    assert found[0] in str(
        why_none([Failure("tests/cluster/test_a.py::test_b", ""), Failure(f"{found[0]}::test_a", "")])
    )

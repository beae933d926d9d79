"""A soak runs what its lines repeat, with seeds that differ, and reports what fails."""

import sys
from itertools import islice
from random import Random

import pytest

from tests.soak import __main__ as soaking
from tests.soak.pieces import BATCH, Piece, pieces, property_files

FILES = ("tests/a.py", "tests/b.py")
FAILING = Piece((sys.executable, "-c", "raise SystemExit('it is wrong')"))


def test_a_seed_repeats_a_whole_soak() -> None:
    first, again = (list(islice(pieces(FILES, Random(7)), 30)) for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first), "each has a seed of its own"


def test_all_files_and_both_explorations_have_their_turn() -> None:
    lines = [piece.line for piece in islice(pieces(FILES, Random(1)), BATCH + 2)]
    assert all(any(f" {file} " in line for line in lines) for file in FILES)
    assert sum("-m tests.explore " in line for line in lines) == 1
    assert sum("-m tests.schedules " in line for line in lines) == 1


def test_files_with_property_tests_are_those_that_pytest_lists() -> None:
    listed = (
        "tests/x/test_a.py::test_1[a::b]\ntests/x/test_a.py::test_2\ntests/test_b.py::T::test\n\n3/90 tests collected\n"
    )
    assert property_files(listed) == ("tests/x/test_a.py", "tests/test_b.py")


def test_a_failure_is_printed_with_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soaking, "found_files", lambda: FILES)
    monkeypatch.setattr(soaking, "pieces", lambda *_: iter([FAILING, *[Piece((sys.executable, "-c", ""))] * 100_000]))
    assert soaking.soak(0.5, 2, 3) == 1
    printed = capsys.readouterr().out
    assert "it is wrong" in printed
    assert f"failed: {FAILING.line}" in printed
    assert "(--seed 3), 1 failed" in printed


def test_the_variable_that_fixes_seeds_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    asks = "import os; raise SystemExit(os.environ.get('CI'))"
    assert soaking.problem_of(Piece((sys.executable, "-c", asks))) == ""

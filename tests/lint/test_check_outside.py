"""`make lint` finds each form that writes an attribute of an object from outside its class's module."""

import pytest

from tests.lint.checkers import run

OWNER = """\
from dataclasses import dataclass


@dataclass
class Gate:
    state: str = ""
    count: int = 0

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *error: object) -> None:
        self.state = "closed"


def open_it(gate: Gate) -> None:
    gate.state = "open"  # the module of the class
"""
HEAD = """\
from argparse import Namespace
from dataclasses import dataclass

from gates.owner import Gate


@dataclass
class Own:
    gate: Gate
    number: int = 0


class Wide(Gate):
    def close(self) -> None:
        self.state = "closed"


def change(gate: Gate, own: Own, several: list[Gate], maybe: Gate | None, made: Namespace, wide: Wide) -> None:
"""
FAULTS = [
    "gate.state = 'open'",
    "gate.count += 1",
    "own.gate.state = 'open'",
    "several[0].count = 1",
    "assert maybe is not None; maybe.count = 1",
    "own.number, gate.count = 1, 2",
    "[own.number, several[0].count] = [1, 2]",
    "del gate.count",
    "for gate.count in range(3): pass",
    "with gate as several[0].count: pass",
    "Gate().state = 'open'",
    "wide.state = 'open'",
]
CLEAN = [
    "own.number = 1",
    "own.number += gate.count",
    "made.anything = 1",
    "own = Own(gate)",
    "several[0] = gate",
    "wide.close()",
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("outside")
    package = root / "gates"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "owner.py").write_text(OWNER)
    for number, form in enumerate([*FAULTS, *CLEAN]):
        (package / f"form{number}.py").write_text(f"{HEAD}    {form}\n")
    lines = run("check_types", "--root", str(root), "--package", "gates").stdout.splitlines()
    assert [line for line in lines if "error:" in line] == []
    return lines


@pytest.mark.parametrize("form", FAULTS)
def test_a_write_from_outside_is_found(faults: list[str], form: str) -> None:
    file = f"gates/form{FAULTS.index(form)}.py:{HEAD.count(chr(10)) + 1}: "
    (found,) = [line for line in faults if line.startswith(file)]
    assert found.endswith("is written from outside gates.owner.Gate")


def test_nothing_else_is_found(faults: list[str]) -> None:
    assert len(faults) == len(FAULTS)

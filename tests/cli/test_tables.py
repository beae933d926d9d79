"""Tables on terminals of several widths: no cell is cut, identifying columns never wrap, reasons follow below."""

import os
import pty
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cli.diagnosis.status import print_status
from gpuvirt.cli.output.tables import NARROWEST, Column, Table, paragraph
from gpuvirt.controller.clusterstatus import ClusterStatus, Row
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import GPUVIRT, PATH, ran

WIDTHS = (80, 120, 200)
REASON = "VgpuInUse: " + " ".join(f"word{number:02}" for number in range(41)) + "xyz"
OFFERED = "12 nvidia.com/NVIDIA_A10-4Q (1 allocated), 2 nvidia.com/NVIDIA_A10-24Q"
COMPONENTS = (
    Row("node01.example.org", "vm-vgpu", "sandbox-device-plugin", ready=True, state="Running", detail=OFFERED),
    Row("node01.example.org", "vm-vgpu", "sandbox-validator", ready=True, state="Running"),
    Row(
        "node01.example.org", "vm-vgpu", "vgpu-device-manager", ready=False, state="ProcessesNotVisible", detail=REASON
    ),
)


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    columns: int = request.param
    monkeypatch.setenv("COLUMNS", str(columns))
    return columns


def test_status_shows_columns_uncut_and_reasons_below(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(REASON) == 300
    print_status(ClusterStatus("cluster-policy", "notReady", REASON, COMPONENTS))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= width
    for row in COMPONENTS:
        ready = "yes" if row.ready else "no"
        pattern = rf"{re.escape(row.node)} .*\b{row.component} +{ready} +{row.state}"
        (line,) = (line for line in lines if re.match(pattern, line))
        assert REASON[:9] not in line
    below = shown[shown.index("ProcessesNotVisible") :]
    assert REASON in " ".join(below.split())
    assert below.splitlines()[1].startswith(f"  {REASON[:9]}")
    assert OFFERED in " ".join(shown.split())
    assert (f"Running              {OFFERED}" in shown) == (width == 200)


def test_a_terminal_of_unknown_width_has_eighty_columns() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*GPUVIRT, "sim", "hosts"], stdout=theirs, env={"PATH": PATH}) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert process.returncode == 0
    assert 70 < max(len(line) for line in shown.splitlines()) <= 80


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def test_no_line_is_wrapped_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_status(ClusterStatus("cluster-policy", "notReady", REASON, COMPONENTS))
    lines = capsys.readouterr().out.splitlines()
    head, *rows = lines[lines.index("") + 1 :]
    assert [re.split("  +", row)[:5] for row in rows] == [
        [row.node, row.workload, row.component, "yes" if row.ready else "no", row.state] for row in COMPONENTS
    ]
    assert [row[head.index("DETAIL") :] for row in rows] == [OFFERED, "-", REASON]


def test_a_reader_that_ends_early_gets_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*GPUVIRT, "sim", "hosts"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
            env={"PATH": PATH},
        )
    assert done.stderr == b""


FIX = " " * 9 + "fix:", " " * 15
"""How lines of doctor begin that may be commands."""
COMMANDS = (
    ("devices",),
    ("devices", "--all"),
    ("vfio", "status"),
    ("vfio", "bind", "--all", "--dry-run"),
    ("vgpu", "list"),
    ("vgpu", "types"),
    ("vgpu", "scheduler", "get"),
    ("doctor", "--all"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) / "host" for name in ("8xH100", "2xA10-vgpu", "4xRTX2060")}
    for name, folder in found.items():
        export(build_host(load_host(name)), folder)
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("simulated", ["8xH100", "2xA10-vgpu", "4xRTX2060"])
def test_tables_fit_the_terminal_and_break_no_word(
    hosts: Mapping[str, Path], simulated: str, command: tuple[str, ...]
) -> None:
    def shown(columns: int) -> str:
        environment = {"COLUMNS": str(columns), "GPUVIRT_HOST_ROOT": str(hosts[simulated])}
        done = ran(*command, environment=environment)
        assert done.stderr == ""
        return done.stdout

    whole = shown(2000)
    for width in WIDTHS:
        found = shown(width)
        too_long = [line for line in found.splitlines() if len(line) > width and len(line.split()) > 2]
        assert [line for line in too_long if command[0] != "doctor" or not line.startswith(FIX)] == []
        assert set(_words(whole)) <= {*_words(found), *_headings(whole)}


def _words(text: str) -> list[str]:
    """Return the words of the output without the time."""
    return [word.rstrip(":") for word in re.sub(r"as of [\d: -]+ UTC", "", text).split()]


def _headings(whole: str) -> set[str]:
    """Return the headings of columns that are omitted because they are empty."""
    return {"-", *next(iter(whole.splitlines()), "").split()}


words = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=60)
cells = st.lists(words, max_size=6).map(" ".join)


@given(
    st.lists(st.booleans(), min_size=1, max_size=6).flatmap(
        lambda folds: st.tuples(st.just(folds), st.lists(st.lists(cells, min_size=len(folds), max_size=len(folds))))
    ),
    st.integers(NARROWEST, 250),
)
def test_every_cell_is_shown_uncut(table: tuple[list[bool], list[list[str]]], width: int) -> None:
    folds, rows = table
    columns = [Column(f"C{at}", folds=fold) for at, fold in enumerate(folds)]
    made = Table(columns)
    for row in rows:
        made.add(*row)
    lines = [line.plain for line in made.lines(width)]
    shown = " ".join(" ".join(lines).split())
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            if cell != "-":
                assert " ".join(cell.split()) in shown
            if not column.folds:
                assert any(" ".join(cell.split()) in line for line in lines)
    if all(folds):
        assert all(len(line) <= width or len(line.split()) <= 2 or line == lines[0] for line in lines)


@given(cells, st.integers(NARROWEST, 250), st.integers(0, 20))
def test_a_paragraph_breaks_only_at_spaces(text: str, width: int, indent: int) -> None:
    lines = [line.plain for line in paragraph(text, width, head=" " * indent)]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert all(line.startswith(" " * indent) for line in lines)


def test_control_characters_are_not_printed() -> None:
    made = Table([Column("A"), Column("B", folds=True)])
    made.add("\x1b[31mred", "two\nlines", below=["\x07bell"])
    assert [line.plain for line in made.lines(80)] == ["A         B", "?[31mred  two lines", "  ?bell"]


def test_sim_hosts_fits_eighty_columns() -> None:
    lines = ran("sim", "hosts", environment={"COLUMNS": "80"}).stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("8xA100 "))
    assert lines[at + 1].startswith(" " * lines[at].index("HGX"))

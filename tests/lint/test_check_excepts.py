"""`make lint` finds each form of a handler that answers an error with a known value where rule 1 is decided."""

import pytest

from tests.lint.checkers import run

HEAD = """\
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuvirt.facts.notknown import NotKnown

ABSENT = frozenset({2})
log = logging.getLogger(__name__)


class Unread(NotKnown):
    def __init__(self, errno: int | None = None) -> None:
        self.errno = errno


class Report:
    def __init__(self, what: object = None) -> None:
        self.problem: object = what

    def read(self) -> tuple[str, ...]:
        raise OSError

    def exists(self) -> bool:
        return True

    def observe(self, problem: object) -> None: ...


class DamagedError(Exception):
    pass


"""
TRY = """\
def read(report: Report, folder: Path) -> object:
    found: tuple[str, ...] = ("before",)
    for _ in range(2):
        try:
            found = report.read()
        except OSError as error:
            {}
        report.observe(found)
    return ()
"""
FAULTS = [
    "return ()",
    "return None",
    "return False",
    "return 'unknown'",
    "return frozenset[str]()",
    "return error.args == ()",
    "return Report()",
    "return Unread() if error.args else ()",
    "return () if error.errno in {1} else Unread()",
    "log.warning('%s', error); return []",
    "report.observe(error); return []",
    "pass",
    "continue",
    "break",
    "log.warning('%s', error)",
    "found = ()",
    "found = () if error.args else found",
    "report.observe(1)",
    "if error.args: raise",
    "if error.args: raise\n            return ()",
    "if error.args: return ()\n            raise",
    "if error.args: continue\n            raise",
]
CLEAN = [
    "raise",
    "raise DamagedError from error",
    "return Unread()",
    "return error",
    "return Report(error)",
    "return Report(f'it failed: {error}')",
    "return ('read', Unread())",
    "return Unread() if error.args else error",
    "report.problem = Unread(); continue",
    "report.observe(error)",
    "report.observe(Report(str(error)))",
    "if error.args: raise\n            return Unread()",
    "if error.args: raise\n            else: return error",
    "return ()  # unknown: a test of the check",
    "# unknown: a test of the check\n            return ()",
    "return () if error.errno in ABSENT else Unread(error.errno)",
    "return Unread(error.errno) if error.errno not in ABSENT else ()",
    "if error.errno in ABSENT: return ()\n            raise",
    "if error.errno not in ABSENT: raise\n            else: return ()",
]
OTHERS = {
    "suppress": "def read(report: Report) -> None:\n    with suppress(OSError):\n        report.read()\n",
    "exists": "def read(folder: Path) -> bool:\n    return folder.exists()\n",
    "glob": "def read(folder: Path) -> list[Path]:\n    return list(folder.glob('*'))\n",
}
FORMS = {
    **{form: TRY.format(form) for form in (*FAULTS, *CLEAN)},
    **OTHERS,
    "another class": "def read(report: Report) -> object:\n    return report.exists()\n",
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The forms with a fault where rule 1 is decided, and the paths of those with a fault elsewhere."""
    root = tmp_path_factory.mktemp("forms")
    for folder in ("deciding", "other"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").touch()
        for number, form in enumerate(FORMS.values()):
            (root / folder / f"form{number}.py").write_text(HEAD + form)
    lines = run("check_types", "--root", str(root), "--deciding", "deciding").stdout.splitlines()
    assert [line for line in lines if "error:" in line] == []
    names = {f"deciding/form{number}.py": form for number, form in enumerate(FORMS)}
    return [names.get(place := line.partition(":")[0], place) for line in lines if "note:" not in line]


@pytest.mark.parametrize("form", [*FAULTS, *OTHERS])
def test_a_known_value_for_an_error_is_found(faults: list[str], form: str) -> None:
    assert form in faults


def test_nothing_else_is_found(faults: list[str]) -> None:
    assert set(faults) == {*FAULTS, *OTHERS}

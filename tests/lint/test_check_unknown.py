"""`make lint` finds each form that takes unknown for absent or present; types without a truth value raise TypeError."""

import re
from dataclasses import dataclass

import pytest

from gpuvirt.facts.notknown import NotKnown
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import UsersUnknown
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.paths import HostPath
from tests.lint.checkers import run

HEAD = """\
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.notknown import NotKnown


class Unread(NotKnown):
    pass


Users = tuple[str, ...] | Unread


@dataclass(frozen=True)
class Facts:
    users: Users
    reset: bool | Unread | None
    counted: frozenset[str] | Unread
    by_group: Mapping[int, Users]

    @property
    def by_property(self) -> Users:
        return self.users


def read() -> Users:
    return Unread()


def decide(facts: Facts, several: list[Users], given: Users) -> object:
"""
EVERYWHERE = [
    "return facts.users or ()",
    "return facts.counted or frozenset()",
    "return read() or []",
    "return facts.by_group[1] or ()",
    "return given and 1",
    "return 1 if facts.reset else 0",
    "return not facts.reset",
    "return bool(facts.by_property)",
    "return [item for item in several if item]",
    "return {number: 1 for number, item in enumerate(several) if item}",
    "return any(item for item in several)",
    "return all([facts.reset, facts.users])",
    "return facts.reset is None or facts.reset or 1",
    "return 1 if facts.counted and facts.reset is None else 2",
    "return (found := read()) or 1",
    "return (lambda: read() or ())()",
    "if facts.users: return 1",
    "if several and facts.users: return 1",
    "while facts.users: return 1",
    "assert facts.users",
    "match 1:\n        case 1 if facts.users: return 1\n        case _: pass",
    "if next(iter(several), None): return 1",
]
WHERE_RULE_ONE_IS_DECIDED = [
    "return facts.reset is False",
    "return facts.reset is not True",
    "return facts.users == ()",
    "return frozenset() != facts.counted",
    "return () if isinstance(facts.users, Unread) else facts.users",
    "return facts.counted if not isinstance(facts.counted, Unread) else frozenset[str]()",
    "return facts.by_group.get(1, ())",
]
CLEAN = [
    "return isinstance(facts.users, Unread) or bool(facts.users)",
    "return facts.reset is None",
    "return 1 if isinstance(facts.users, tuple) and facts.users else 2",
    "return facts.by_group.get(1)",
    "return facts.by_group.get(1, Unread())",
    "return len(several) or 1",
    "if isinstance(given, Unread): return 'unknown'\n    if given: return 'used'\n    return 'free'",
    "match facts.users:\n        case Unread(): return 1\n        case (): return 2\n        case _: return 3",
    "return facts.users or ()  # unknown: a test of the check",
    "# unknown: a test of the check\n    return facts.reset is False",
]


FAULT = re.compile(r"(\w+/form\d+\.py):(\d+): (?!error|note)(.+)")


@dataclass(frozen=True)
class Checked:
    """The lines with faults of modules that have one form each."""

    deciding: dict[str, list[int]]
    other: dict[str, list[int]]
    errors: list[str]


def module(form: str) -> str:
    return f"{HEAD}    {form}\n" + ("" if form.startswith("return") else "    return None\n")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    root = tmp_path_factory.mktemp("forms")
    forms = [*EVERYWHERE, *WHERE_RULE_ONE_IS_DECIDED, *CLEAN]
    for folder in ("deciding", "other"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").touch()
        for number, form in enumerate(forms):
            (root / folder / f"form{number}.py").write_text(module(form))
    found = run("check_types", "--root", str(root), "--deciding", "deciding").stdout.splitlines()
    faults = [match for line in found if (match := FAULT.fullmatch(line)) is not None]

    def lines(folder: str) -> dict[str, list[int]]:
        return {
            form: [int(fault[2]) for fault in faults if fault[1] == f"{folder}/form{number}.py"]
            for number, form in enumerate(forms)
        }

    errors = [line for line in found if FAULT.fullmatch(line) is None and "[unreachable]" not in line]
    return Checked(lines("deciding"), lines("other"), errors)


FIRST = HEAD.count("\n") + 1


def test_the_forms_are_of_known_types(checked: Checked) -> None:
    assert checked.errors == []


@pytest.mark.parametrize("form", EVERYWHERE)
def test_a_truth_test_of_a_value_that_may_be_unknown_is_a_fault_everywhere(checked: Checked, form: str) -> None:
    assert [line - FIRST in {0, 1} for line in checked.deciding[form]] == [True]
    assert checked.other[form] == checked.deciding[form]


@pytest.mark.parametrize("form", WHERE_RULE_ONE_IS_DECIDED)
def test_a_known_value_for_unknown_is_a_fault_where_rule_one_is_decided(checked: Checked, form: str) -> None:
    assert checked.deciding[form] == [FIRST]
    assert checked.other[form] == []


@pytest.mark.parametrize("form", CLEAN)
def test_a_decision_that_names_all_three_values_is_no_fault(checked: Checked, form: str) -> None:
    assert checked.deciding[form] == []


@pytest.mark.parametrize(
    "unknown",
    [Unread(HostPath("/proc")), Unknown(), UsersUnknown(Unread(HostPath("/proc")))],
    ids=type,
)
def test_unknown_has_no_truth_value(unknown: NotKnown) -> None:
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(unknown)

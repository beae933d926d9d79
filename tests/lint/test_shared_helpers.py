"""No module imports a module of tests: what tests share has a module of its own, which is named for what it holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "bench", "lab", "tools")


def imported_tests(source: str) -> Iterator[str]:
    """Yield the modules of tests that a module imports, or imports from."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.ImportFrom(names=names):
                modules = [alias.name for alias in names]
            case _:
                continue
        yield from (module for module in modules if any(part.startswith("test_") for part in module.split(".")))


def test_no_module_imports_a_module_of_tests() -> None:
    found = {
        str(path.relative_to(ROOT)): modules
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (modules := list(imported_tests(path.read_text())))
    }
    assert found == {}, "move what they share into a module beside them, which is named by a noun"


@pytest.mark.parametrize(
    "line",
    [
        "from tests.agent.node.test_changes import FIRST",
        "from tests.agent.node.test_changes import FIRST as GPU, SECOND",
        "from tests.agent.node import test_changes",
        "import tests.agent.node.test_changes as changes",
        "from . import test_changes",
        "from .test_changes import FIRST",
        "def f():\n    import tests.agent.node.test_changes",
    ],
)
def test_each_form_of_an_import_is_found(line: str) -> None:
    assert list(imported_tests(line)) != []


@pytest.mark.parametrize(
    "line", ["from tests.agent.node.simnode import SimNode", "import tests.conftest", "from . import a"]
)
def test_helpers_may_be_imported(line: str) -> None:
    assert list(imported_tests(line)) == []

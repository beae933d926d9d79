"""`make lint` finds modules that could be one with their only importer."""

from pathlib import Path

import pytest

from tests.lint.checkers import faults

LONG = "x = 1\n" * 300


def package(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / "gpuvirt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    "line",
    [
        "from gpuvirt.node.part import x",
        "from gpuvirt.node import part",
        "import gpuvirt.node.part",
        "from .part import x",
        "from . import part",
        "def late():\n    from gpuvirt.node import part",
    ],
)
def test_a_module_with_one_importer_is_a_fault(tmp_path: Path, line: str) -> None:
    folder = package(tmp_path, {"node/whole.py": f"{line}\n", "node/part.py": "x = 1\n"})
    assert [fault.partition(" ")[0] for fault in faults("check_importers", folder)] == ["node/part.py:"]


@pytest.mark.parametrize(
    "files",
    [
        {"node/whole.py": "import gpuvirt.node.part\n", "node/part.py": LONG},
        {"node/whole.py": f"import gpuvirt.model.part\n{LONG[:60]}", "model/part.py": "x = 1\n"},
        {
            "node/whole.py": "from gpuvirt.node import part\n",
            "node/part.py": "",
            "web/other.py": "import gpuvirt.node.part",
        },
        {"node/part.py": "x = 1\n"},
        {"node/whole.py": "from gpuvirt.node.part import x\n", "node/part/__init__.py": "x = 1\n"},
    ],
    ids=["long", "another layer", "two importers", "no importer", "a package"],
)
def test_other_modules_are_no_fault(tmp_path: Path, files: dict[str, str]) -> None:
    assert faults("check_importers", package(tmp_path, files)) == []


def test_the_package_passes() -> None:
    assert faults("check_importers") == []

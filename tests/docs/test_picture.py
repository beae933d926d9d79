"""The pictures are drawn from what they show: the flow from its source, the terminal from the demo."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parent.parent.parent


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(tmp_path: Path) -> ModuleType:
    """The tool in a copy of its folders."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/make_picture.py", tmp_path / "tools")
    (tmp_path / "docs").mkdir()
    for file in ROOT.glob("docs/flow*"):
        shutil.copy(file, tmp_path / "docs")
    return loaded(tmp_path / "tools/make_picture.py")


def checked(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["make_picture.py", "--check"])
    code: int = tool.main()
    return code


def test_the_pictures_are_of_the_current_source(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(tool, monkeypatch) == 0


@pytest.mark.parametrize("change", ["source", "palette", "missing"])
def test_the_check_finds_a_picture_of_another_source(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "source":
        tool.SOURCE.write_text(tool.SOURCE.read_text().replace("Offers", "Offer"))
    elif change == "palette":
        tool.PALETTES["dark"]["ink"] = "#ffffff"
    else:
        tool.file_of("light").unlink()
    assert checked(tool, monkeypatch) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_is_a_document_of_its_own(theme: str) -> None:
    """A browser shows an SVG in an img only if it is well-formed, and loads nothing that it refers to."""
    root = ET.parse(ROOT / f"docs/flow-{theme}.svg").getroot()  # noqa: S314  drawn from our own source
    assert root.tag.endswith("svg")
    text = ET.tostring(root, encoding="unicode")
    assert "<image" not in text
    assert "href" not in text
    for word in ("controller", "Facts", "Inventory", "Offers", "Allocation", "Attachment", "kubelet", "extender"):
        assert f">{word}<" in text
    assert f"flow-{theme}.svg" in (ROOT / "docs/architecture.md").read_text()


def test_the_terminal_shows_what_the_demo_prints() -> None:
    terminal = loaded(ROOT / "tools/make_terminal.py")
    lines = terminal.shown()
    for theme in terminal.PALETTES:
        file = terminal.file_of(theme)
        assert file.read_text() == terminal.drawn(lines, theme), "run make picture"
        ET.parse(file)  # noqa: S314  drawn by ourselves
        assert f"docs/{file.name}" in (ROOT / "README.md").read_text()

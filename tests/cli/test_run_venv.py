"""`make demo` sets up a .venv without pip, whose commands run the sources of the tree."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gpuvirt import __version__

TREE = Path(__file__).parent.parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose path has a space and is longer than the kernel's limit for a script's first line."""
    folder = tmp_path / f"a tree {'x' * 200}"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(TREE / "tools/run_venv.py", folder / "tools")
    shutil.copy(TREE / "pyproject.toml", folder)
    for name in ("src", "schedules", "simulator"):
        (folder / name).symlink_to(TREE / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    subprocess.run([folder / ".venv/bin/python", folder / "tools/run_venv.py", "links"], check=True)
    return folder


@pytest.mark.parametrize("name", ["gpuvirt", "nvidia-kubevirt-gpu-device-plugin", "vfio-manage", "nvidia-vgpu-dm"])
def test_venv_commands_run_the_sources_of_the_tree(tree: Path, name: str) -> None:
    """Dependencies come from the Python that runs the tests."""
    done = subprocess.run(
        [tree / ".venv/bin" / name, "--help"],
        env={"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


def test_the_sources_are_found_without_an_install(tree: Path) -> None:
    (site_packages,) = (tree / ".venv/lib").glob("python3.*/site-packages")
    expected = f"{tree / 'src'}\n{tree / 'schedules/src'}\n{tree / 'simulator/src'}\n"
    assert (site_packages / "gpuvirt-sources.pth").read_text() == expected
    code = "import gpuvirt; print(gpuvirt.__version__)"
    assert subprocess.check_output([tree / ".venv/bin/python", "-c", code], text=True) == f"{__version__}\n"


def test_pip_runs_without_being_installed(tree: Path) -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import run_venv; print(*run_venv._pip(), sep='\\n')"
    how = subprocess.check_output([sys.executable, "-c", code], cwd=tree, text=True).splitlines()
    reported = subprocess.check_output([tree / ".venv/bin/python", *how, "--version"], text=True)
    assert reported.startswith("pip ")

"""The message of `make` when it can't fetch the packages of Python that gpuvirt needs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOBODY = "http://127.0.0.1:9/simple"
"""The address of a package index that does not answer."""


@pytest.mark.parametrize("target", ["demo", "lint"])
def test_without_a_package_index_one_line_says_how_to_mend_it(tmp_path: Path, target: str) -> None:
    files = ("Makefile", "pyproject.toml", "uv.lock", "constraints.txt", "tools", "src/gpuvirt/__init__.py")
    for name in (*files, "schedules/pyproject.toml", "simulator/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    offline = {"PIP_INDEX_URL": NOBODY, "PIP_CONFIG_FILE": "/dev/null", "UV_DEFAULT_INDEX": NOBODY}
    path = os.environ["PATH"]  # noqa: TID251  where make and Python are
    environment = {"PATH": path, "HOME": str(tmp_path), "PIP_NO_CACHE_DIR": "1", **offline}
    done = subprocess.run(
        ["make", target],  # noqa: S607
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    first, fix = (line for line in done.stderr.splitlines() if line.startswith("gpuvirt: "))
    assert "no package index answers" in first
    assert "PIP_INDEX_URL" in fix
    assert "WARNING" not in done.stderr
    assert "Traceback" not in done.stderr

"""A test's timeout doesn't count the time in which the lab builds what the test needs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import time
from tests.conftest import _built, pytest_collection_modifyitems
from tests.rings import RINGS, Ring
RINGS["slow"] = Ring("a peer that is built for long", lambda: None, "", 1, (lambda: time.sleep(2),))
"""
TEST = """
import pytest
@pytest.mark.ring("slow")
@pytest.mark.timeout(1)
def test_with_the_peer(): pass
"""
SETTINGS = "[pytest]\ntimeout_func_only = true\nmarkers = ring\n"


def test_a_build_that_takes_longer_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, "test_peer.py": TEST, "pytest.ini": SETTINGS}.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251  of the run below
    command = [sys.executable, "-m", "pytest", "-n0", "--import-mode=importlib", "--durations=0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "s setup " in done.stdout, "it was built"

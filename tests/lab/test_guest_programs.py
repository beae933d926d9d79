"""The guest's programs can be imported with the packages that are copied into the guest: it has no others."""

import subprocess
import sys
from pathlib import Path

from lab.kernel.guest import copy_programs

IMPORT = """
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
for program in sorted(pathlib.Path(sys.argv[1], "lab/kernel/inside").glob("*.py")):
    importlib.import_module(f"lab.kernel.inside.{program.stem}")
    print(program.stem)
"""


def test_each_program_of_the_guest_finds_its_imports(tmp_path: Path) -> None:
    copy_programs(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", IMPORT, str(tmp_path)]
    child = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (0, "")
    assert {"agent", "changer"} <= set(child.stdout.split())

"""Other processes at the gate of a slot: one drains it, one has a lock."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.facts.ids import PciAddress, slot_of

GPU = PciAddress("0000:65:00.0")
SLOT = slot_of(GPU)
DRAINER = """
import sys, time
from pathlib import Path
from gpuvirt.agent.change.gate.gate import gate_at
gate_at(Path(sys.argv[1])).drain("unit", (sys.argv[2],), "unbind it")
print("drains", flush=True)
sys.stdin.read()
"""


@contextmanager
def draining(folder: Path, slot: str = SLOT) -> Iterator["subprocess.Popen[str]"]:
    """Run another process that drains a slot."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRAINER, str(folder), slot], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "drains\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have a lock as another process would: locks belong to the open file, not to the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)

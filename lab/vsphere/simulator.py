"""Builds the simulated vCenter, and starts it as a process that tests tell what happens there."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from lab.cache import cache_root, digest, once, say
from lab.cluster.golang import go, installed_go, run

SOURCES = Path(__file__).parent
PROGRAM = "vsphere"
USER = "gpuvirt@vsphere.local"


class State(msgspec.Struct, frozen=True):
    """The simulator's state: the power of each VM by name, and the calls with VMs that it has begun."""

    power: dict[str, str]
    calls: list[str]


class _Started(msgspec.Struct, frozen=True):
    port: int


@dataclass(frozen=True, slots=True)
class Serving:
    """The files of one simulator: its certificate with its key, and the file that keeps its state over restarts."""

    certificate: Path
    key: Path
    state: Path
    password: str


class VSphere:
    """One running simulator; any thread may command it."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        """Read the port from a simulator that has just started."""
        self._commands, self._answers = commands, answers
        self._lock = threading.Lock()
        self.port = msgspec.json.decode(self._line(), type=_Started).port

    def command(self, **fields: object) -> State:
        """Send a command (`main.go` and `lab.go` say which), and return the state after it."""
        with self._lock:  # the answers have no numbers
            self._commands.write(json.dumps(fields) + "\n")
            self._commands.flush()
            return msgspec.json.decode(self._line(), type=State)

    def change(self, name: str, **values: str) -> State:
        """Change a VM's `power`, `connection` or `tools` as an admin, a host or the guest does."""
        return self.command(name=name, set=values)

    @property
    def state(self) -> State:
        """The state now."""
        return self.command()

    def _line(self) -> str:
        line = self._answers.readline()
        if not line:
            raise ChildProcessError("the simulated vCenter has ended")
        return line


@contextmanager
def vsphere(serving: Serving, *options: str, port: int = 0) -> Iterator[VSphere]:
    """Run a simulator on 127.0.0.1; raises BuildError where it can't be built."""
    files = (f"-certificate={serving.certificate}", f"-key={serving.key}", f"-state={serving.state}")
    command = [str(program()), *files, f"-user={USER}", f"-port={port}", *options]
    with subprocess.Popen(
        command,
        env=os.environ | {"VSPHERE_PASSWORD": serving.password},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise ChildProcessError("the simulated vCenter has no pipes")
        try:
            yield VSphere(process.stdin, process.stdout)
        finally:
            process.kill()


def program() -> Path:
    """Return the simulator, and build it where it is missing; raises BuildError."""
    return once(_built(), _build) / PROGRAM


def lacks() -> str | None:
    """Return why the simulator is missing and is not built automatically; None where it exists, or a Go.

    Where all tests must run (`CI=true`), Go is downloaded, too.
    """
    available = _built().exists() or installed_go() is not None
    return None if available or os.environ.get("CI") == "true" else "no Go that builds the simulated vCenter"


def _built() -> Path:
    texts = (path.read_text() for path in sorted((*SOURCES.glob("*.go"), *SOURCES.glob("go.*"))))
    return cache_root() / f"vsphere-{digest(*texts)}"


def _build(folder: Path) -> None:
    say("building the simulated vCenter: a minute on 2 cores, once")
    with_sources = folder / "sources"
    shutil.copytree(SOURCES, with_sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run([go(), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / PROGRAM), "."], with_sources)

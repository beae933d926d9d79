"""A host mounted by `gpuvirt sim mount`, and a shell to use it."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GPUVIRT = [sys.executable, "-m", "gpuvirt"]


@contextmanager
def mount(folder: Path, simulated: str, *options: str) -> Iterator["subprocess.Popen[str]"]:
    folder.mkdir(exist_ok=True)
    command = [*GPUVIRT, "sim", "mount", "--host", simulated, str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        line = server.stdout.readline()
        assert line == f"{simulated} is mounted at {folder} until Ctrl-C\n", server.stderr.read()
        try:
            yield server
        finally:
            server.terminate()


def detach_dead_mounts(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Detach simulators' mounts whose server has ended, and return their folders.

    A killed test run leaves them in its temporary folder, and no later run could delete that folder.
    """
    lines = (line.split() for line in mounts.read_text().splitlines())
    folders = [Path(folder) for source, folder, kind, *_ in lines if (source, kind) == ("gpuvirt", "fuse")]
    dead = [folder for folder in folders if _is_dead(folder)]
    for folder in dead:
        subprocess.run(["/usr/bin/env", "fusermount3", "-u", "-z", folder], check=False)
    return dead


def _is_dead(folder: Path) -> bool:
    try:
        os.statvfs(folder)  # unlike a stat, whose answer the kernel keeps for a second after the server's end
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def shell(command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}  # noqa: TID251  passed on
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def until(met: Callable[[], bool]) -> None:
    while not met():
        time.sleep(0.01)  # noqa: TID251  another process's time

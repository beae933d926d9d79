"""Measures a walk through the open files of all processes of this computer, and prints a table.

`python -m bench.walks` starts thousands of processes that sleep with files, sockets, pipes and nodes open. Such a walk
is what a change takes, right before a destructive write, as the proof that no process uses a device.
"""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.results import Results
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.paths import HostRoots

SOCKET_PAIRS, PIPES, NODES = 5, 2, 3
"""The descriptors of each process besides files; the nodes are `/dev/null`, as a daemon has it three times."""
COLUMNS = GPUVIRT, FLOOR = ("gpuvirt", "floor")
"""The floor is a bare list and readlink of each descriptor."""


@contextmanager
def sleepers(processes: int, descriptors: int) -> Iterator[Sequence[int]]:
    """Let this many processes sleep for as long as the context lasts, each with this many descriptors."""
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as opened:
        fds = list(_open(opened, descriptors - NODES))
        try:
            started.extend(_start(fds) for _ in range(processes))
            yield [process.pid for process in started]
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


def _open(stack: contextlib.ExitStack, count: int) -> Iterator[int]:
    """Open files of the kinds that processes have."""
    pairs = (socket.socketpair() for _ in range(SOCKET_PAIRS))
    fds = [stack.enter_context(end).fileno() for pair in pairs for end in pair]
    fds += [fd for _ in range(PIPES) for fd in os.pipe()]
    fds += [os.open("/bin/sleep", os.O_RDONLY) for _ in range(count - len(fds))]
    for fd in fds[2 * SOCKET_PAIRS :]:
        stack.callback(os.close, fd)
    yield from fds


def _start(fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    null = subprocess.DEVNULL
    return subprocess.Popen(["/bin/sleep", "3600"], pass_fds=fds, stdin=null, stdout=null, stderr=null)


def measure(rounds: int, walk: Callable[[], object]) -> tuple[float, float]:
    """Return the median duration of a walk and its median processor time, in seconds."""
    walls, used = [], []
    for _ in range(rounds):
        wall_s, processor_s = time.perf_counter(), time.process_time()
        walk()
        walls.append(time.perf_counter() - wall_s)
        used.append(time.process_time() - processor_s)
    return statistics.median(walls), statistics.median(used)


def _walk(kernel: RealKernel, *, mapped: bool) -> None:
    for _ in kernel.open_files(mapped=mapped):
        pass


def _read_links(proc: Path) -> None:
    for pid in os.listdir(proc):  # noqa: PTH208  the floor: no Path objects
        for number in os.listdir(f"{proc}/{pid}/fd"):  # noqa: PTH208
            os.readlink(f"{proc}/{pid}/fd/{number}")  # noqa: PTH115


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.walks", description=__doc__)
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--descriptors", type=int, default=50, help="of each process")
    parser.add_argument("--rounds", type=int, default=9, help="the median counts")
    arguments = parser.parse_args()
    results = Results(verbose=False)
    with sleepers(arguments.processes, arguments.descriptors) as pids, tempfile.TemporaryDirectory() as folder:
        proc = Path(folder, "proc")
        proc.mkdir()
        for pid in pids:  # and no other process of this computer, some of which may not be read in a container
            (proc / str(pid)).symlink_to(f"/proc/{pid}")
        kernel = RealKernel(HostRoots.under(Path(folder)))
        walks = {
            "walk of descriptors": {GPUVIRT: partial(_walk, kernel, mapped=False), FLOOR: partial(_read_links, proc)},
            "walk of descriptors and mappings": {GPUVIRT: partial(_walk, kernel, mapped=True)},
        }
        for what, programs in walks.items():
            for whose, walk in programs.items():
                wall_s, processor_s = measure(arguments.rounds, walk)
                results.add(whose, f"{what}, s", wall_s)
                results.add(whose, f"{what}, processor time, s", processor_s)
    print(results.table(COLUMNS))


if __name__ == "__main__":
    main()

"""The processes of a simulated host in `/proc`: their names, and the device nodes that they have open."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gpuvirt.hardware.usage.processes import INITIAL_NAMESPACE
from gpuvirt.paths import HostPath
from gpuvirt.sim.files.tree import Folder, Link, Tree, constant

FIRST_PID = 4001
FIRST_FILE = 23


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the simulated host."""

    pid: int
    command: str


class Processes:
    """All processes of a simulated host."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.hide(hidden=False)
        self._pids = itertools.count(FIRST_PID)

    def next(self, command: str) -> Process:
        """Return a process that `/proc` does not show yet."""
        return Process(next(self._pids), command)

    def show(self, process: Process, nodes: Sequence[str]) -> None:
        """Show a process in `/proc`, with the nodes that it has open."""
        self._tree.place(HostPath(f"/proc/{process.pid}/comm"), constant(process.command))
        self._tree.place(HostPath(f"/proc/{process.pid}/status"), constant("Cpus_allowed_list:\t0-127"))
        for number, node in enumerate(nodes, FIRST_FILE):
            self._tree.place(HostPath(f"/proc/{process.pid}/fd/{number}"), Link(node))

    def hide(self, *, hidden: bool = True) -> None:
        """Make `/proc` that of a PID namespace below the host's, as in a pod without hostPID."""
        tree = self._tree
        tree.place(HostPath("/proc/1/ns/pid"), Link("pid:[4026532298]" if hidden else INITIAL_NAMESPACE))

    def end(self, process: Process) -> None:
        """Remove a process from `/proc`."""
        self._tree.remove(HostPath(f"/proc/{process.pid}"))

    def has_open(self, node: str) -> bool:
        """Return whether a process has a node open."""
        return any(
            isinstance(file, Link) and file.target == node
            for process in self._tree.folder(HostPath("/proc")).entries.values()
            if isinstance(process, Folder) and isinstance(files := process.entries.get("fd"), Folder)
            for file in files.entries.values()
        )

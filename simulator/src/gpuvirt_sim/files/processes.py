"""The processes of a simulated host in `/proc`: their names, and the device nodes that they have open."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from gpuvirt.hardware.usage.processes import INITIAL_NAMESPACE
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import Folder, Link, Tree, constant

FIRST_PID = 4001
FIRST_FILE = 23
FIRST_MAPPING = 0x7F0000000000
MAPPING_BYTES = 0x1000


class Process(msgspec.Struct, frozen=True):
    """A process on the simulated host."""

    pid: int
    command: str


class Processes:
    """All processes of a simulated host."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        tree.place(HostPath("/proc/1/root"), Link("../.."))
        self.hide(hidden=False)
        self._pids = itertools.count(FIRST_PID)
        self._shown: dict[int, Process] = {}
        self._deleted: dict[HostPath, int] = {}
        """The device numbers of open files whose nodes were deleted, by their links (`/proc/4001/fd/23`)."""

    def next(self, command: str) -> Process:
        """Return a process that `/proc` does not show yet."""
        return Process(next(self._pids), command)

    def show(self, process: Process, nodes: Sequence[str], pod: str | None = None) -> None:
        """Show a process in `/proc`, with the nodes that it has open; `pod` is the UID of its pod."""
        group = "system.slice/ssh.service" if pod is None else pod_group(pod)
        self._tree.place(HostPath(f"/proc/{process.pid}/cgroup"), constant(f"0::/{group}"))
        self._shown[process.pid] = process
        self._tree.place(HostPath(f"/proc/{process.pid}/comm"), constant(process.command))
        self._tree.place(HostPath(f"/proc/{process.pid}/status"), constant("Cpus_allowed_list:\t0-127"))
        for number, node in enumerate(nodes, FIRST_FILE):
            self._tree.place(HostPath(f"/proc/{process.pid}/fd/{number}"), Link(node))

    def map(self, process: Process, node: str) -> None:
        """Give a process a mapping of a node, which it keeps when it closes the node."""
        start, end = FIRST_MAPPING, FIRST_MAPPING + MAPPING_BYTES
        line = f"{start:x}-{end:x} rw-s 00000000 00:05 612                        {node}"
        self._tree.place(HostPath(f"/proc/{process.pid}/maps"), constant(line))
        self._tree.place(HostPath(f"/proc/{process.pid}/map_files/{start:x}-{end:x}"), Link(node))

    def hide(self, *, hidden: bool = True) -> None:
        """Make `/proc` that of a PID namespace below the host's, as in a pod without hostPID."""
        tree = self._tree
        tree.place(HostPath("/proc/1/ns/pid"), Link("pid:[4026532298]" if hidden else INITIAL_NAMESPACE))

    def end(self, process: Process) -> None:
        """Remove a process from `/proc`."""
        folder = HostPath(f"/proc/{process.pid}")
        self._shown.pop(process.pid, None)
        self._deleted = {link: number for link, number in self._deleted.items() if not link.startswith(f"{folder}/")}
        self._tree.remove(folder)

    def has_open(self, node: str) -> bool:
        """Return whether a process has a node open."""
        return any(target == node for _, target in self._files())

    def having_open(self, node: str) -> Sequence[Process]:
        """Return the processes that have a node open."""
        pids = {int(link.split("/")[2]) for link, target in self._files() if target == node}
        return [process for pid, process in sorted(self._shown.items()) if pid in pids]

    def delete_node(self, node: str, number: int) -> None:
        """Let the processes that have a node open have a file of a deleted node."""
        for link in [link for link, target in self._files() if target == node]:
            self._tree.place(link, Link(f"{node} (deleted)"))
            self._deleted[link] = number

    def deleted_number(self, link: HostPath) -> int | None:
        """Return the device number of an open file whose node was deleted; None for other files."""
        return self._deleted.get(link)

    def has_deleted(self, number: int) -> bool:
        """Return whether a process has a file open whose node was deleted."""
        return number in self._deleted.values()

    def _files(self) -> Iterator[tuple[HostPath, str]]:
        """Yield the links of all open files, with their targets."""
        for pid, process in self._tree.folder(HostPath("/proc")).entries.items():
            for links in ("fd", "map_files") if isinstance(process, Folder) else ():
                files = process.entries.get(links) if isinstance(process, Folder) else None
                for number, file in files.entries.items() if isinstance(files, Folder) else ():
                    if isinstance(file, Link):
                        yield HostPath(f"/proc/{pid}/{links}/{number}"), file.target


def pod_group(uid: str) -> str:
    """Return the control group of a container of a pod, as systemd names it."""
    slices = "kubepods.slice/kubepods-besteffort.slice"
    return f"{slices}/kubepods-besteffort-pod{uid.replace('-', '_')}.slice/cri-containerd-5ca1ab1e.scope"

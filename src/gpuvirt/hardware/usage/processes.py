"""Reads the processes of a host and the device nodes that they have open, Unread unless all processes are
visible."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.paths import HostPath

T = TypeVar("T")

NAMESPACES = HostPath("/proc/1/ns")
NAMESPACE = HostPath(f"{NAMESPACES}/pid")
INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the namespace that shows every process of the host."""

PROC = HostPath("/proc")
HIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.ESTALE})
"""The errors of the kernel for a process that this process may not read, or an open file that it may not look at:
ESTALE on NFS, where another client has deleted the file."""
ENDED = attributes.ABSENT | {errno.ESRCH}
"""The errors for a process that has ended meanwhile, and for the program of a thread of the kernel."""

KUBELETS = frozenset({"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent"})
"""The command names of the kubelets: that of most distributions, MicroK8s', and K3s'."""
_KUBELET = re.compile(
    r"\.?(daemon-)?(kubelet|kubelite|k3s|k0s|rke2|edgecore|hyperkube|microshift)([-_. ].*)?", re.DOTALL
)
"""The names of programs that may be a kubelet: a version or a wrapper's suffix may follow (`kubelet-1.31.2`).

K3s and RKE2 write `/usr/bin/k3s server` as their first argument; of a replaced program, the kernel shows `kubelet
(deleted)`. Further kubelets are parts of `edgecore` (KubeEdge), `hyperkube` and `microshift`, or children of `k0s`.
"""


def read_open_nodes(kernel: Kernel, *, mapped: bool = False) -> tuple[OpenFile, ...] | Unread:
    """Return the nodes that processes have open, or have `mapped` as well; Unread unless all processes are visible."""
    return _if_all_visible(kernel, lambda: kernel.open_files(mapped=mapped))


def read_kubelets(kernel: Kernel) -> tuple[int, ...] | Unread:
    """Return the pids of the running kubelets, Unread unless all processes and their names can be read."""

    def kubelets() -> Sequence[int]:
        processes = pids(kernel)
        # Nearly every kubelet has its usual command name, which takes one read of each process.
        named = [pid for pid in processes if _is_kubelet(_text(kernel, pid, "comm").removesuffix("\n"))]
        return named or [pid for pid in processes if any(map(_is_kubelet, _programs(kernel, pid)))]

    try:
        return _if_all_visible(kernel, kubelets)
    except OSError as error:
        return Unread(place_of(error), errno=error.errno or errno.EIO)


def has_usual_root(kernel: Kernel) -> bool:
    """Return whether it is certain that the running kubelet keeps its files in `/var/lib/kubelet`.

    Only the program `kubelet` gets all its flags on its command line; `--root-dir` has no other source.
    """
    kubelets = read_kubelets(kernel)
    if isinstance(kubelets, Unread):
        return False

    def roots() -> Iterator[bool]:
        for pid in kubelets:
            line = kernel.read(HostPath(f"/proc/{pid}/cmdline"), limit=attributes.FILE_BYTES)
            yield command_of(kernel, pid) == "kubelet" and b"root-dir" not in line

    found = _if_all_visible(kernel, roots)
    return not isinstance(found, Unread) and found != () and all(found)


def read_kubelet_start(kernel: Kernel, now_s: float, since_boot_s: float) -> float:
    """Return the time since which the kubelets that run have run, by the monotonic clock, which says `now_s`.

    It is `now_s` if none runs, and `-inf` where that is unknown. `since_boot_s` counts the host's suspensions, too, as
    the start time of a process does (proc_pid_stat(5)).
    """
    kubelets = read_kubelets(kernel)
    if isinstance(kubelets, Unread):
        return -inf
    try:
        stats = [kernel.read(HostPath(f"/proc/{pid}/stat")) for pid in kubelets]
        ticks = [int(stat.rpartition(b")")[2].split()[19]) for stat in stats]
    except (OSError, ValueError, IndexError):
        return -inf  # unknown: a kubelet may have run since any time
    return min((now_s - since_boot_s + count / os.sysconf("SC_CLK_TCK") for count in ticks), default=now_s)


def _is_kubelet(program: str) -> bool:
    return _KUBELET.fullmatch(program) is not None


def _programs(kernel: Kernel, pid: int) -> Iterator[str]:
    """Yield the names of a process's program, by its first argument and by the file that it runs."""
    first = content(kernel, pid, "cmdline").partition("\0")[0].rstrip("\n")
    yield from {first.rpartition("/")[2], first.partition(" ")[0].rpartition("/")[2]}
    try:
        yield kernel.readlink(HostPath(f"/proc/{pid}/exe")).rpartition("/")[2]
    except OSError as error:  # unknown: nothing, the process has ended or runs no program
        if error.errno not in ENDED:
            raise


def pids(kernel: Kernel) -> Sequence[int]:
    """Return the processes that `/proc` shows; raise OSError."""
    return [int(name) for name in kernel.listdir(PROC) if name.isascii() and name.isdigit()]


def content(kernel: Kernel, pid: int, name: str) -> str:
    """Return a file of a process, nothing for a process that has ended."""
    return _text(kernel, pid, name, limit=attributes.FILE_BYTES)


def _text(kernel: Kernel, pid: int, name: str, *, limit: int = ATTRIBUTE_BYTES) -> str:
    try:
        return kernel.read(HostPath(f"/proc/{pid}/{name}"), limit=limit).decode(errors="replace")
    except OSError as error:
        if error.errno in ENDED:
            return ""
        raise


def place_of(error: OSError) -> HostPath:
    """Return the file of a process that could not be read."""
    return HostPath(error.filename) if isinstance(error.filename, str) else PROC


def shows_all(proc: Path) -> bool:
    """Return whether a `/proc` is that of the initial PID namespace, which shows every process of the host."""
    try:
        return str((proc / "1/ns/pid").readlink()) == INITIAL_NAMESPACE
    except OSError:
        return False  # unknown: counts as hiding some, so that another /proc is preferred to it


def _if_all_visible(kernel: Kernel, walk: Callable[[], Iterable[T]]) -> tuple[T, ...] | Unread:
    """Return the result of a walk through `/proc`, Unread where `/proc` does not show every process.

    The `/proc` of another PID namespace would show no process for a device that a VM of the host has open.
    """
    try:
        # A kernel without CONFIG_PID_NS has only one PID namespace, and does not list it.
        if "pid" in kernel.listdir(NAMESPACES) and (namespace := kernel.readlink(NAMESPACE)) != INITIAL_NAMESPACE:
            return Unread(NAMESPACE, seen=namespace)
        return tuple(walk())
    except OSError as error:
        if error.errno in HIDDEN | attributes.ABSENT:
            return Unread(place_of(error), errno=error.errno or errno.EIO)
        raise


def command_of(kernel: Kernel, pid: int) -> str:
    """Return the command name of a process, which may contain any bytes."""
    try:
        content = kernel.read(HostPath(f"/proc/{pid}/comm"))
    except OSError:
        # unknown: a name for people; to callers that compare it, it is no kubelet's, which proves nothing
        return "unknown"
    return attributes.legible(content.decode(errors="surrogateescape").removesuffix("\n"))

"""The processes of a host: which nodes under `/dev` they have open, told only where every process can be seen."""

import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from gpuvirt.facts.pci import Unread
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel, OpenFile
from gpuvirt.paths import HostPath

T = TypeVar("T")

NAMESPACES = HostPath("/proc/1/ns")
NAMESPACE = HostPath(f"{NAMESPACES}/pid")
INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the namespace that shows every process of the host."""

PROC = HostPath("/proc")
HIDDEN = frozenset({errno.EACCES, errno.EPERM})
"""What the kernel answers about a process that this one may not look into."""


KUBELETS = frozenset({"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent"})
"""What kubelets call themselves: that of most distributions, MicroK8s', and K3s'."""


def read_open_nodes(kernel: Kernel) -> tuple[OpenFile, ...] | Unread:
    """Return the nodes that processes have open, Unread where one process could be hidden from this walk."""
    return _seen_whole(kernel, kernel.open_files)


def read_kubelets(kernel: Kernel) -> tuple[int, ...] | Unread:
    """Return the pids of the kubelets that run, Unread where one process could be hidden from this walk."""

    def kubelets() -> Iterator[int]:
        pids = (int(name) for name in kernel.listdir(PROC) if name.isascii() and name.isdigit())
        return (pid for pid in pids if command_of(kernel, pid) in KUBELETS)

    return _seen_whole(kernel, kubelets)


def shows_all(proc: Path) -> bool:
    """Return whether a `/proc` is known to be of the initial PID namespace, which shows every process of the host."""
    try:
        return str((proc / "1/ns/pid").readlink()) == INITIAL_NAMESPACE
    except OSError:
        return False


def _seen_whole(kernel: Kernel, walk: Callable[[], Iterable[T]]) -> tuple[T, ...] | Unread:
    """Return what a walk of `/proc` finds, Unread where it does not see every process.

    A walk in another PID namespace shows that nobody has a device open which a VM of the host has.
    """
    try:
        # A kernel without CONFIG_PID_NS has one namespace alone, and does not list it.
        if "pid" in kernel.listdir(NAMESPACES) and (namespace := kernel.readlink(NAMESPACE)) != INITIAL_NAMESPACE:
            return Unread(NAMESPACE, seen=namespace)
        return tuple(walk())
    except OSError as error:
        if error.errno in HIDDEN | attributes.ABSENT:
            return Unread(HostPath(error.filename) if isinstance(error.filename, str) else PROC, errno=error.errno)
        raise


def command_of(kernel: Kernel, pid: int) -> str:
    """Return what a process calls itself, which may be any bytes."""
    try:
        content = kernel.read(HostPath(f"/proc/{pid}/comm"))
    except OSError:
        return "unknown"
    return attributes.legible(content.decode(errors="surrogateescape").removesuffix("\n"))

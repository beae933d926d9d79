"""The processes of a host: which nodes under `/dev` they have open, told only where every process can be seen."""

import errno

from gpuvirt.facts.pci import Unread
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel, OpenFile
from gpuvirt.paths import HostPath

NAMESPACES = HostPath("/proc/1/ns")
NAMESPACE = HostPath(f"{NAMESPACES}/pid")
INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the namespace that shows every process of the host."""

PROC = HostPath("/proc")
HIDDEN = frozenset({errno.EACCES, errno.EPERM})
"""What the kernel answers about a process that this one may not look into."""


def read_open_nodes(kernel: Kernel) -> tuple[OpenFile, ...] | Unread:
    """Return the nodes that processes have open, Unread where one process could be hidden from this walk.

    A walk in another PID namespace shows that nobody has a device open which a VM of the host has.
    """
    try:
        # A kernel without CONFIG_PID_NS has one namespace alone, and does not list it.
        if "pid" in kernel.listdir(NAMESPACES) and (namespace := kernel.readlink(NAMESPACE)) != INITIAL_NAMESPACE:
            return Unread(NAMESPACE, seen=namespace)
        return tuple(kernel.open_files())
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

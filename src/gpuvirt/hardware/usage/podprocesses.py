"""Finds the pods whose processes run on this host, by the control groups of all processes.

The kubelet creates one control group for each pod, named by the pod's UID: `/kubepods/burstable/pod8a5c...`, or with
systemd `kubepods-burstable-pod8a5c....slice` with underscores for hyphens (kubelet/cm, `GetPodContainerName`). It
removes the group after the last process has ended. The group also has the process that keeps the pod's namespaces,
which runs before the first container and after the last one.
"""

import errno
from collections.abc import Collection
from contextlib import suppress

from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.attributes import ABSENT
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.processes import INITIAL_NAMESPACE, KUBELETS, NAMESPACE, PROC, command_of
from gpuvirt.paths import HostPath

_ENDED = ABSENT | {errno.ESRCH}
"""The errors for a process that has ended meanwhile."""


def read_running_pods(kernel: Kernel, pods: Collection[PodUid]) -> frozenset[PodUid] | Unread:
    """Return those of `pods` that have a process; Unread where `/proc` does not show the kubelet's pods.

    It shows them if it is that of the host, or if it shows the kubelet: on a node that is a container itself, the pods
    are in the kubelet's namespace or below it.
    """
    by_name = {name: uid for uid in pods for name in (f"pod{uid}", f"pod{uid.replace('-', '_')}")}
    found: set[PodUid] = set()
    try:
        pids = [int(name) for name in kernel.listdir(PROC) if name.isascii() and name.isdigit()]
        if not _shows_pods(kernel, pids):
            return Unread(NAMESPACE, seen="neither the host's processes nor the kubelet")
        for pid in pids:
            groups = _groups_of(kernel, pid)
            found.update(uid for name, uid in by_name.items() if name in groups)
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else PROC
        return Unread(HostPath(path), errno=error.errno or errno.EIO)
    return frozenset(found)


def _shows_pods(kernel: Kernel, pids: Collection[int]) -> bool:
    with suppress(OSError):  # the kubelet's process proves it, too, where this link can't be read
        if kernel.readlink(NAMESPACE) == INITIAL_NAMESPACE:
            return True
    return any(command_of(kernel, pid) in KUBELETS for pid in pids)


def _groups_of(kernel: Kernel, pid: int) -> str:
    """Return the control groups of a process, none for one that has ended."""
    try:
        return kernel.read(HostPath(f"/proc/{pid}/cgroup")).decode(errors="replace")
    except OSError as error:
        if error.errno in _ENDED:
            return ""
        raise

"""Finds the pods whose processes run on this host, by the control groups and the mounts of all processes.

The kubelet creates one control group for each pod, named by the pod's UID: `/kubepods/burstable/pod8a5c...`, or with
systemd `kubepods-burstable-pod8a5c....slice` with underscores for hyphens (kubelet/cm, `GetPodContainerName`). The
group also has the process that keeps the pod's namespaces, which runs before the first container and after the last
one. With `cgroupsPerQOS: false` there is no such group. Then the mounts of a container tell its pod: `/etc/hosts` and
the file of the termination message are in the pod's folder, `/var/lib/kubelet/pods/UID/`.
"""

import errno
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.processes import (
    ENDED,
    INITIAL_NAMESPACE,
    KUBELETS,
    NAMESPACE,
    command_of,
    content,
    pids,
    place_of,
)
from gpuvirt.paths import HostPath

_OWN_FILES = re.compile(r"^\S+ \S+ \S+ \S*/pods/([^/\s]+)/(?:etc-hosts|containers/)", re.MULTILINE)
"""The root of a mount of `/etc/hosts` or of a termination message (proc_pid_mountinfo(5), field 4). The volumes of a
pod are mounted on the host and in other pods, too."""


def read_running_pods(kernel: Kernel, pods: Collection[PodUid]) -> frozenset[PodUid] | Unread:
    """Return those of `pods` that have a process; Unread where `/proc` does not show the kubelet's pods.

    It shows them if it is that of the host, or if it shows the kubelet: on a node that is a container itself, the pods
    are in the kubelet's namespace or below it.
    """
    by_name = group_names(pods)
    found: set[PodUid] = set()
    try:
        processes = pids(kernel)
        if not _shows_pods(kernel, processes):
            return Unread(NAMESPACE, seen="neither the host's processes nor the kubelet")
        seen: set[str] = set()
        for pid in processes:
            groups = content(kernel, pid, "cgroup")
            named = {uid for name, uid in by_name.items() if name in groups}
            if not named and (namespace := mount_namespace(kernel, pid)) not in seen:
                seen.add(namespace)
                named = pods_of(mounts(kernel, pid)) & {*pods}
            found |= named
    except OSError as error:
        return Unread(place_of(error), errno=error.errno or errno.EIO)
    return frozenset(found)


def pods_of(mounts: str) -> set[PodUid]:
    """Return the pods whose own files are mounted: that of a container, in its mounts."""
    return {PodUid(uid) for uid in _OWN_FILES.findall(mounts)}


def group_names(pods: Collection[PodUid]) -> Mapping[str, PodUid]:
    """Return the pods by the names that their control groups have with either driver."""
    return {name: uid for uid in pods for name in (f"pod{uid}", f"pod{uid.replace('-', '_')}")}


def _shows_pods(kernel: Kernel, processes: Collection[int]) -> bool:
    with suppress(OSError):  # unknown: the kubelet's process proves it, too, where this link can't be read
        if kernel.readlink(NAMESPACE) == INITIAL_NAMESPACE:
            return True
    return any(command_of(kernel, pid) in KUBELETS for pid in processes)


def mount_namespace(kernel: Kernel, pid: int) -> str:
    """Return the mount namespace of a process, which many processes share; its pid where it can't be read."""
    try:
        return kernel.readlink(HostPath(f"/proc/{pid}/ns/mnt"))
    except OSError:
        return str(pid)  # unknown: a namespace of its own, so that its mounts are read


def mounts(kernel: Kernel, pid: int) -> str:
    """Return the mounts of a process, nothing for one that has ended.

    A thread that has ended, and whose end nobody has awaited, has no mounts: EINVAL (`mounts_open_common` in
    fs/proc_namespace.c). Where it is a process's first thread, others may run on.
    """
    try:
        return content(kernel, pid, "mountinfo")
    except OSError as error:  # unknown: nothing, the other threads are read below
        if error.errno != errno.EINVAL:
            raise
    found = ""
    for thread in _threads(kernel, pid):
        try:
            found += content(kernel, pid, f"task/{thread}/mountinfo")
        except OSError as error:  # unknown: nothing, the thread has ended
            if error.errno != errno.EINVAL:
                raise
    return found


def _threads(kernel: Kernel, pid: int) -> Sequence[str]:
    try:
        return kernel.listdir(HostPath(f"/proc/{pid}/task"))
    except OSError as error:
        if error.errno in ENDED:
            return ()
        raise

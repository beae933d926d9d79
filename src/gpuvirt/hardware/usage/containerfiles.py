"""Reads a file of a container's own file systems through a process of it, without following where the container leads.

A container may replace each folder on the way by a link, which would be followed on the host, and the file by a pipe or
a device. So each part of the path is opened by itself, without links, and what is opened has to be a file.

A process of each container that counts its memory in a file system of its own is found by control groups and mounts.
The control group names the pod (`podprocesses`). The termination message, which the kubelet mounts into each container
from `pods/UID/containers/NAME/`, names the container.
"""

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.podprocesses import group_names, mount_namespace, mounts
from gpuvirt.hardware.usage.processes import content, pids
from gpuvirt.paths import HostPath

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

ContainerOfPod = tuple[PodUid, str]
"""The pod, and the name of the container."""
_ALL_PODS = "/kubepods"
"""The control group of all pods. With `cgroupsPerQOS: false` there is none, and the mounts alone name the pod."""
_ANY = r"[^/\s]+"


def read_containers(
    kernel: Kernel, pods: Collection[PodUid], folder: HostPath | None = None
) -> Mapping[ContainerOfPod, int]:
    """Return a process of each container of these pods, or of those that have a tmpfs at `folder`; raise OSError."""
    by_name = group_names(pods)
    found: dict[ContainerOfPod, int] = {}
    seen: set[str] = set()
    for pid in pids(kernel):
        groups = content(kernel, pid, "cgroup")
        uid = next((uid for name, uid in by_name.items() if name in groups), None)
        if (uid is None and _ALL_PODS in groups) or (namespace := mount_namespace(kernel, pid)) in seen:
            continue
        seen.add(namespace)
        lines = mounts(kernel, pid)
        container = re.search(rf"/pods/({re.escape(uid) if uid is not None else _ANY})/containers/({_ANY})/", lines)
        if container is not None and container[1] in pods and (folder is None or _has_tmpfs(lines, folder)):
            found.setdefault((PodUid(container[1]), container[2]), pid)
    return found


def _has_tmpfs(mount_lines: str, folder: HostPath) -> bool:
    """Return whether a file system is mounted there: proc_pid_mountinfo(5), fields 5 and 9."""
    return re.search(rf"^\S+ \S+ \S+ \S+ {re.escape(folder)} .* - tmpfs ", mount_lines, re.MULTILINE) is not None


@contextmanager
def opened(proc: Path, pid: int, path: Sequence[str]) -> Iterator[int]:
    """Open the file with these parts of its path below the root folder of a process; raise OSError.

    ELOOP or ENOTDIR: a part is a link; EINVAL: it is no file.
    """
    folder = os.open(proc / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # A look before the file is opened: opening a device may have an effect.
        if not stat.S_ISREG(os.stat(path[-1], dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path[-1])
        file = os.open(path[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path[-1])
        yield file
    finally:
        os.close(file)

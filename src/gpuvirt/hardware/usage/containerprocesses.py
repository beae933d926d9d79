"""Finds a process of each container that counts its memory in a file system of its own, by control groups and mounts.

The control group names the pod (`podprocesses`). The termination message, which the kubelet mounts into each container
from `pods/UID/containers/NAME/`, names the container.
"""

import re
from collections.abc import Collection, Mapping

from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.podprocesses import content, group_names, mount_namespace, mounts, pids
from gpuvirt.paths import HostPath

ContainerOfPod = tuple[PodUid, str]
"""The pod, and the name of the container."""
_ALL_PODS = "/kubepods"
"""The control group of all pods. With `cgroupsPerQOS: false` there is none, and the mounts alone name the pod."""
_ANY = r"[^/\s]+"


def read_containers(kernel: Kernel, pods: Collection[PodUid], folder: HostPath) -> Mapping[ContainerOfPod, int]:
    """Return a process of each container of these pods that has a tmpfs at `folder`; raise OSError."""
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
        if container is not None and container[1] in pods and _has_tmpfs(lines, folder):
            found.setdefault((PodUid(container[1]), container[2]), pid)
    return found


def _has_tmpfs(mount_lines: str, folder: HostPath) -> bool:
    """Return whether a file system is mounted there: proc_pid_mountinfo(5), fields 5 and 9."""
    return re.search(rf"^\S+ \S+ \S+ \S+ {re.escape(folder)} .* - tmpfs ", mount_lines, re.MULTILINE) is not None

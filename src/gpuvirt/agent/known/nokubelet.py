"""Proves that no kubelet has run on this host in this boot: only then no pod has a device.

A kubelet leaves traces while it is stopped, whatever its name and its folder are: the processes of its pods, by their
control groups (kubelet/cm, `kubepods`) and mounts; the processes by which container runtimes keep the containers of
pods; and its folder. What can't be read is a trace, too. The host's files are read below the root of process 1, since
a container sees other folders than the host.

A unit, an empty folder and an empty control group are no traces: a package and `kubeadm reset` leave them.
"""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.attributes import ABSENT, FILE_BYTES
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.podprocesses import mount_namespace, mounts, pods_of
from gpuvirt.hardware.usage.processes import command_of, content, pids, place_of
from gpuvirt.paths import HostPath, KubeletPaths

Kubelets = tuple[int, ...] | Unread
"""The pids of the running kubelets."""

_HOST = "/proc/1/root"
_FOLDERS = (
    "/var/lib/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
    "/var/lib/k0s/kubelet",
    "/var/lib/rancher/k3s/agent/kubelet",
    "/var/lib/edged",
)
"""The usual folders of kubelets: of most, of MicroK8s, k0s, early K3s, and early KubeEdge."""
_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/transient",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_CONFIGS = (
    "/etc/default/kubelet",
    "/etc/sysconfig/kubelet",
    "/var/lib/kubelet/kubeadm-flags.env",
    "/etc/rancher/k3s/config.yaml",
    "/etc/rancher/rke2/config.yaml",
    "/etc/kubeedge/config/edgecore.yaml",
    "/var/snap/microk8s/current/args/kubelet",
)
_NAMED = re.compile(r"root-?dir(?:ectory)?[\"']?[=:,\s\0]\s*[\"']?(/[^\s\0\"',;\]}]*)", re.IGNORECASE)
"""A folder in arguments or a configuration: `--root-dir=/data`, `"root-dir", "/data"`, `rootDirectory: /data`."""
_POD_GROUP = re.compile(r"/\S*kubepods\S*")
_KEEPERS = ("containerd-shim", "conmon")
"""The beginnings of the names of programs that container runtimes keep running beside each container."""
_OF_PODS = re.compile(r"(?:^|=)k8s\.io$|/crio\b|/log/pods/")
"""An argument that such a program has for a container of a pod.

containerd and its CRI plugin name the namespace k8s.io (`-namespace k8s.io`), also where the container is a VM (Kata).
CRI-O names its folders (`--exit-dir /var/run/crio/exits`), and to Kata its own program (`-publish-binary
/usr/bin/crio`). Docker's namespace is `moby`; Podman's conmon has none of these.
"""
_MOST_PARTS = 1000
"""The names of one path, with those in the targets of links, before ELOOP."""


class NoKubelet:
    """The proof that no kubelet has run on this host in this boot, by what was read when it was made.

    `prove` makes it, and no other module does (`tools/check_proofs.py`).
    """

    __slots__ = ()


class KubeletTrace(msgspec.Struct, frozen=True):
    """A fact that shows that a kubelet has run, or may have run."""

    seen: str
    is_elsewhere: bool = True
    """Whether it may be the trace of a kubelet with another folder than the one that gpuvirt reads."""


def prove(kernel: Kernel, paths: KubeletPaths, kubelets: Callable[[], Kubelets]) -> NoKubelet | KubeletTrace:
    """Return the proof that no kubelet has run on a host, or a trace of one.

    Each reading of the agent comes here, so the files of a kubelet are looked for first, and all processes last.
    """
    if not _is_empty(paths.root):
        return KubeletTrace(f"{paths.root} has files", is_elsewhere=False)
    running = kubelets()
    if isinstance(running, Unread) or running:
        return KubeletTrace(running_text(running))
    try:
        seen = next(_traces(kernel), None)
    except OSError as error:
        unread = Unread(place_of(error), errno=error.errno or errno.EIO)
        return KubeletTrace(f"it is unknown whether a kubelet has run ({unread.path}: {unread.detail})")
    return NoKubelet() if seen is None else KubeletTrace(f"a kubelet has run: {seen}")


def running_text(kubelets: Kubelets) -> str:
    """Return a text that lists the running kubelets."""
    if isinstance(kubelets, Unread):
        return f"it is unknown whether a kubelet runs ({kubelets.path}: {kubelets.detail})"
    return f"a kubelet runs (pid {', '.join(map(str, kubelets))})"


def _is_empty(folder: Path) -> bool:
    """Return whether a folder is missing or empty; False where that is unknown. A package may have created it."""
    try:
        folder.lstat()
    except OSError as error:
        return error.errno in ABSENT  # unknown: not empty
    try:
        return next(folder.iterdir(), None) is None
    except OSError:
        return False  # unknown: not empty


def _traces(kernel: Kernel) -> Iterator[str]:
    """Yield the traces of kubelets; raise OSError where a trace may be hidden."""
    named: dict[tuple[str, str], None] = {(_HOST, folder): None for folder in _FOLDERS}
    namespaces: set[str] = set()
    for pid in pids(kernel):
        arguments = content(kernel, pid, "cmdline")
        # Many processes share the mounts of a namespace.
        is_new = (namespace := mount_namespace(kernel, pid)) not in namespaces
        namespaces.add(namespace)
        trace = of_process(content(kernel, pid, "cgroup"), arguments, mounts(kernel, pid) if is_new else "")
        if trace is not None:
            yield f"process {pid} ({command_of(kernel, pid)}) {trace}"
        named |= {(f"/proc/{pid}/root", folder): None for folder in _NAMED.findall(arguments)}
    for config in _configs(kernel):
        named |= {(_HOST, folder): None for folder in _NAMED.findall(config)}
    for root, folder in named:
        yield from _in_folder(kernel, root, KubeletPaths(Path(folder)))


def of_process(groups: str, arguments: str, mounted: str) -> str | None:
    """Return what a process shows of a kubelet, by its `cgroup`, `cmdline` and `mountinfo` in `/proc`."""
    if (group := _POD_GROUP.search(groups)) is not None:
        return f"is in the control group {group[0]}"
    program, *others = arguments.split("\0")
    if program.rpartition("/")[2].startswith(_KEEPERS) and any(map(_OF_PODS.search, others)):
        return "keeps a container of a pod"
    if uids := pods_of(mounted):
        return f"has files of pod {min(uids)} mounted"
    return None


def _in_folder(kernel: Kernel, root: str, paths: KubeletPaths) -> Iterator[str]:
    """Yield the checkpoint and the pods in a kubelet's folder."""
    for name in _names(kernel, root, str(paths.device_plugins)):
        if name == paths.checkpoint.name:
            yield f"its folder has {paths.checkpoint}"
    for name in _names(kernel, root, str(paths.pods)):
        yield f"its folder has {paths.pods / name}"


def _configs(kernel: Kernel) -> Iterator[str]:
    """Yield the files that may name a kubelet's folder: configurations, and systemd's units with their drop-ins."""
    for path in _CONFIGS:
        yield _file(kernel, "", path)
    for folder in {_real(kernel, _HOST, folder): None for folder in _UNITS}:
        for name in _names(kernel, _HOST, folder):
            if name.endswith(".service"):
                yield _file(kernel, folder, name)
            elif name.endswith(".service.d"):
                for dropin in _names(kernel, _HOST, f"{folder}/{name}"):
                    yield _file(kernel, folder, f"{name}/{dropin}")


def _names(kernel: Kernel, root: str, folder: str) -> Sequence[str]:
    """Return the names in a folder, none where it does not exist."""
    try:
        return kernel.listdir(HostPath(root + _real(kernel, root, folder)))
    except OSError as error:
        if error.errno in ABSENT:
            return ()
        raise


def _file(kernel: Kernel, folder: str, path: str) -> str:
    """Return a file of the host below a folder without links, nothing where it does not exist."""
    try:
        found = kernel.read(HostPath(_HOST + _real(kernel, _HOST, path, folder)), limit=FILE_BYTES)
    except OSError as error:
        if error.errno in ABSENT:
            return ""
        raise
    return found.decode(errors="replace")


def _real(kernel: Kernel, root: str, path: str, done: str = "") -> str:
    """Return a path below a root without links: the kernel would follow an absolute link below this process's root.

    `done` is the folder that has the path, already without links.
    """
    ahead = path.split("/")[::-1]
    for _ in range(_MOST_PARTS):
        if not ahead:
            return done
        name = ahead.pop()
        if name in {"", "."}:
            continue
        if name == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = kernel.readlink(HostPath(f"{root}{done}/{name}"))
        except OSError as error:
            if error.errno not in ABSENT | {errno.EINVAL}:  # unknown: EINVAL: it is no link
                raise
            done = f"{done}/{name}"
        else:
            done = "" if target.startswith("/") else done
            ahead += target.split("/")[::-1]
    raise OSError(errno.ELOOP, "too many links", f"{root}{path}")

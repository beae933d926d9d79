"""The leftovers of a node on the computer when its programs have ended: containers, mounts, network, cgroups."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lab.cluster.places import Place

VFIO = Path("/dev/vfio")
NULL = os.makedev(1, 3)
KUBELET = Path("/var/lib/kubelet")
KUBELETS_OWN = (
    *("device-plugins", "plugins", "plugins_registry", "pods", "pod-resources", "checkpoints", "pki", "config"),
    *("actuated_pods_state", "allocated_pods_state", "cpu_manager_state", "memory_manager_state", "dra_manager_state"),
    "image_manager",
)
"""The entries that the kubelet creates below its folder."""
OF_A_STOPPED_KUBELET = ("pki", "cpu_manager_state")
"""Files by which a kubelet that does not run now is recognized."""
MADE = "made-kubelet-folder"
"""The file of the lab's folder that exists if the lab has created the kubelet's folder."""


class Ctr(Protocol):
    """containerd's command ctr."""

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ctr."""
        ...


def make_bridge(place: Place) -> None:
    """Create the bridge of the pods, before a program listens on it."""
    if _run("ip", "link", "show", place.bridge).returncode:
        _run("ip", "link", "add", place.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{place.address}/16", "dev", place.bridge)
        _run("ip", "link", "set", place.bridge, "up")
        _run("ip", "route", "add", place.services, "dev", place.bridge)  # kube-proxy's rules see no packet without
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def remove_bridge(place: Place) -> None:
    """Remove the bridge, and what connects pods to it."""
    for link in re.findall(r"(veth[0-9a-f]+)@", _run("ip", "-o", "link", "show", "master", place.bridge).stdout):
        _run("ip", "link", "delete", link)
    _run("ip", "link", "delete", place.bridge)


def another_kubelet(labs: Path) -> bool:
    """Return whether a kubelet runs here that is not one of the labs, whose files are below a folder."""
    commands = (_command(pid) for pid in _pids())
    return any(Path(argv[0]).name == "kubelet" and str(labs) not in " ".join(argv) for argv in commands if argv[0])


def kubelet_of_its_own(folder: Path, kubelet: Path = KUBELET) -> bool:
    """Return whether the kubelet's folder has files of a kubelet that is not the lab's: the lab has no folder then."""
    return not folder.exists() and any((kubelet / name).exists() for name in OF_A_STOPPED_KUBELET)


def make_kubelet_folder(folder: Path, kubelet: Path = KUBELET) -> None:
    """Create the kubelet's folder, and note it in the lab's folder if there was none."""
    if not kubelet.exists():
        (folder / MADE).touch()
        kubelet.mkdir(parents=True)


def clear_kubelet_folder(folder: Path, kubelet: Path = KUBELET) -> None:
    """Remove the files of the lab's kubelet, and the folder if the lab has made it; nothing if no lab has run.

    gpuvirt takes the folder for that of a kubelet whose allocations are unknown, and refuses to unbind devices.
    """
    if not folder.exists():
        return
    for name in KUBELETS_OWN:
        path = kubelet / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if (folder / MADE).exists():
        with suppress(OSError):  # not empty, or a mount: something else uses it by now
            kubelet.rmdir()


def vfio_of_its_own() -> bool:
    """Return whether the computer has VFIO nodes of its own; all nodes of the lab are `/dev/null`."""
    return VFIO.exists() and any(node.stat().st_rdev != NULL for node in VFIO.iterdir())


def clear_nodes() -> None:
    """Remove the lab's nodes."""
    for node in VFIO.iterdir() if VFIO.exists() else ():
        node.unlink()
    if VFIO.exists():
        VFIO.rmdir()


def end_containers(ctr: Ctr) -> None:
    """Remove all containers, while containerd still runs."""
    for task in ctr("tasks", "ls", "-q").stdout.split():
        ctr("tasks", "delete", "-f", task)


def clear(folder: Path, place: Place) -> None:
    """Remove the rest: shims, mounts, network, nft tables, cgroups, the kubelet's files, and the folder."""
    for pid in _pids():
        if is_leftover(folder, _command(pid)):
            os.kill(pid, signal.SIGKILL)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted(filter(_is_ours(folder), mounts), reverse=True):
        _run("umount", "-l", mount)
    remove_bridge(place)
    for family in ("ip", "ip6"):
        _run("nft", "delete", "table", family, "kube-proxy")
    for namespace in Path("/run/netns").glob("cni-*"):
        namespace.unlink()
    _clear_cgroups()
    if not vfio_of_its_own():
        clear_nodes()
    clear_kubelet_folder(folder)
    for logs in ("/var/lib/cni", "/var/log/pods", "/var/log/containers"):
        shutil.rmtree(logs, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def is_leftover(folder: Path, argv: Sequence[str]) -> bool:
    """Return whether a process is a shim of the lab's containers, or a played kubelet of a run that was killed."""
    is_shim = "containerd-shim" in argv[0] and f"{folder}/containerd.sock" in argv
    return is_shim or f"--kubeconfig={folder}/kubeconfig" in argv


def _is_ours(folder: Path) -> Callable[[str], bool]:
    # Not the kubelet's folder itself, which may be a mount of the computer's own.
    places = (str(folder), f"{KUBELET}/", "/run/netns/cni-", "/var/run/netns/cni-")
    return lambda mount: mount.startswith(places)


MOST_KILLS = 100
"""How often the processes of a cgroup are killed, until the kernel has ended them."""


def _clear_cgroups() -> None:
    root = Path("/sys/fs/cgroup")
    for top in (root / "k8s.io", *root.glob("*/k8s.io")):
        folders = [path for path in top.rglob("*") if path.is_dir()] if top.is_dir() else []
        for path in (*sorted(folders, reverse=True), top):
            if path.is_dir():
                _end_processes(path / "cgroup.procs")
                path.rmdir()


def _end_processes(processes: Path) -> None:
    """End what is left in a cgroup: containers whose start a kubelet has begun that was killed have no task."""
    for _ in range(MOST_KILLS):
        pids = processes.read_text().split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)

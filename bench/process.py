"""A device plugin as a process, and its memory and processor time, measured from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec

OURS = (sys.executable, "-m", "gpuvirt", "node", "--listen", "")
FLOOR = (sys.executable, "-m", "bench.floor")

PEER = """
set -e
mkdir -p "$WORK/dev"
mount --make-rprivate /
mount --rbind /dev "$WORK/dev"
mount -t tmpfs bench /dev
for node in null zero full random urandom tty; do touch /dev/$node; mount --bind "$WORK/dev/$node" /dev/$node; done
cp -r "$GPUVIRT_HOST_ROOT/dev/vfio" /dev/vfio
mount --bind "$GPUVIRT_HOST_ROOT/sys" /sys
mount --bind "$GPUVIRT_KUBELET_DIR" /var/lib/kubelet
unset GPUVIRT_HOST_ROOT GPUVIRT_KUBELET_DIR
exec "$@"
"""
"""Mounts the host's files where a program with fixed paths reads them, in a mount namespace of its own."""
KUBELET = Path("/var/lib/kubelet")


class Plugin(msgspec.Struct, frozen=True):
    """A measured plugin."""

    name: str
    command: Sequence[str]
    wants_fixed_paths: bool = False
    checkout: Path | None = None
    """The checkout of gpuvirt that it runs from, where that is not this one."""


@contextmanager
def started(plugin: Plugin, host: Path, kubelet: Path, bytecode: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a plugin on a host and kubelet, and provide its process; its log is the file `log` in the kubelet's folder.

    Python keeps bytecode in `bytecode`, as an installed package has it beside its files. Some environments forbid that
    (PYTHONDONTWRITEBYTECODE), and half of each start is then compiling.
    """
    work = kubelet / "work"
    work.mkdir()
    environment = os.environ | {
        "GPUVIRT_HOST_ROOT": str(host),
        "GPUVIRT_KUBELET_DIR": str(kubelet),
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "WORK": str(work),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if plugin.checkout is not None:
        environment["PYTHONPATH"] = str(plugin.checkout / "src")
    command = list(plugin.command)
    if plugin.wants_fixed_paths:
        command = ["unshare", "--mount", "sh", "-c", PEER, "sh", *command]
    fixed = mount_point(KUBELET) if plugin.wants_fixed_paths else nullcontext()
    with fixed, (kubelet / "log").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def mount_point(folder: Path) -> Iterator[None]:
    """Provide a folder to mount on, and remove it afterwards if it did not exist.

    A folder that stays would be that of a kubelet for gpuvirt, which then refuses to unbind devices.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # not empty: a kubelet uses it by now
                folder.rmdir()


def pss_kib(pid: int) -> int:
    """Return a process's proportional set size."""
    return _rollup_kib(pid)["Pss"]


def private_kib(pid: int) -> int:
    """Return the memory that a process shares with no other process."""
    rollup = _rollup_kib(pid)
    return rollup["Private_Clean"] + rollup["Private_Dirty"]


def _rollup_kib(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


def children(pid: int) -> list[int]:
    """Return the processes that a process's main thread has started, and that have not ended."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

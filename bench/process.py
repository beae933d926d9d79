"""A device plugin as a process, measured from outside: when it has registered, what it holds, what it burns."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OURS = (sys.executable, "-m", "gpuvirt", "node", "--listen", "")

PEER = """
set -e
mkdir -p "$WORK/dev"
mount --make-rprivate /
mount --rbind /dev "$WORK/dev"
mount -t tmpfs bench /dev
for node in null zero full random urandom tty; do touch /dev/$node; mount --bind "$WORK/dev/$node" /dev/$node; done
cp -r "$GPUVIRT_HOST_ROOT/dev/vfio" /dev/vfio
mount --bind "$GPUVIRT_HOST_ROOT/sys" /sys
mkdir -p /var/lib/kubelet
mount --bind "$GPUVIRT_KUBELET_DIR" /var/lib/kubelet
unset GPUVIRT_HOST_ROOT GPUVIRT_KUBELET_DIR
exec "$@"
"""
"""Puts the host's files where a program with fixed paths looks for them, in a mount namespace of its own."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """What is measured."""

    name: str
    command: Sequence[str]
    wants_fixed_paths: bool = False


@contextmanager
def started(plugin: Plugin, host: Path, kubelet: Path, log: Path) -> Iterator[int]:
    """Run a plugin on a host and kubelet, and give its process id."""
    work = log.parent / f"work-{plugin.name}"
    work.mkdir(exist_ok=True)
    environment = os.environ | {
        "GPUVIRT_HOST_ROOT": str(host),
        "GPUVIRT_KUBELET_DIR": str(kubelet),
        "WORK": str(work),
    }
    command = list(plugin.command)
    if plugin.wants_fixed_paths:
        command = ["unshare", "--mount", "sh", "-c", PEER, "sh", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(10)


def pss_kib(pid: int) -> int:
    """Return a process's proportional set size."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:")))


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used so far, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Containers of a simulated host, with the mounts by which their names are found."""

from pathlib import Path

from gpuvirt.agent.shares.memoryuse import read_uses
from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.node.memoryregion import MemoryUses
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import Link, constant
from gpuvirt_sim.kernel import SimKernel

FOLDER = "/var/lib/kubelet/pods"
REGION = "900 601 0:99 / /usr/local/gpuvirt/region rw,nosuid - tmpfs tmpfs rw,size=16384k\n"


class Containers:
    """Containers of a simulated host, whose files are in a folder of this one."""

    def __init__(self, kernel: SimKernel, proc: Path) -> None:
        self.kernel = kernel
        self.proc = proc

    def start(self, pod: PodUid, name: str, content: bytes | None, mounts: str = REGION) -> int:
        """Start a process in a new container, whose region has this content; return the process."""
        process = self.kernel.start_process("python3", pod=pod)
        log = f"800 601 254:1 {FOLDER}/{pod}/containers/{name}/5ca1ab1e /dev/termination-log rw - ext4 /dev/vda1 rw\n"
        self.kernel.tree.place(HostPath(f"/proc/{process.pid}/ns/mnt"), Link(f"mnt:[{process.pid}]"))
        self.kernel.tree.place(HostPath(f"/proc/{process.pid}/mountinfo"), constant(log + mounts))
        folder = self.proc / f"{process.pid}/root/usr/local/gpuvirt/region"
        folder.mkdir(parents=True)
        if content is not None:
            (folder / "memory").write_bytes(content)
        return process.pid

    def read(self, *pods: PodUid) -> MemoryUses:
        return read_uses(self.kernel, self.proc, pods)

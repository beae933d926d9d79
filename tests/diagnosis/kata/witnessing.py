"""Runs the witness of Kata's cold plug on a folder as its root, where the device nodes of a simulated host exist."""

import asyncio
import json
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.kata.witness import witness

from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel

MAJOR = 240
"""The major number of the nodes: one that is for experiments, so that no driver answers."""
SPEC_FOLDERS = ("etc/cdi", "var/run/cdi")


@dataclass(frozen=True, slots=True)
class Witnessed:
    """The devices and nodes that Kata would find for a pod."""

    devices: tuple[str, ...]
    nodes: tuple[str, ...]
    error: str = ""
    """Why Kata would start no VM; empty if it would."""


class Root:
    """The folder that the witness takes for `/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers: dict[str, int] = {}
        for name in SPEC_FOLDERS:
            (folder / name).mkdir(parents=True)

    @property
    def cdi(self) -> Path:
        """The folder in which the agent writes its specs."""
        return self.folder / SPEC_FOLDERS[1]

    def write(self, path: str, text: str) -> None:
        """Write the CDI spec of another program."""
        (self.folder / path.lstrip("/")).write_text(text)

    def make_nodes(self, kernel: SimKernel) -> None:
        """Make the nodes of the simulated host that do not exist yet, each with a number of its own."""
        for folder in ("/dev/vfio", "/dev/vfio/devices"):
            (self.folder / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # a host without iommufd
                for name in kernel.listdir(HostPath(folder)):
                    self._make_node(f"{folder}/{name}")

    def _make_node(self, path: str) -> None:
        real = self.folder / path.lstrip("/")
        if not real.exists() and not path.endswith("/devices"):
            self.numbers[path] = len(self.numbers) + 1
            os.mknod(real, stat.S_IFCHR | 0o600, os.makedev(MAJOR, self.numbers[path]))

    async def witness(self, pod: str, kubelet: str = "kubelet") -> Witnessed:
        """Ask the kubelet whose folder is below the root for a pod, as Kata does before it starts the VM."""
        program = self.folder / "witness"
        if not program.exists():
            shutil.copy(witness(), program)
        options = ("-socket", f"/{kubelet}/pod-resources/kubelet.sock")
        folders = ",".join(f"/{name}" for name in SPEC_FOLDERS)
        command = ("chroot", str(self.folder), "/witness", *options, "-spec-dirs", folders, pod)
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        stdout, stderr = await running.communicate()
        if running.returncode:
            return Witnessed((), (), stderr.decode())
        found = json.loads(stdout)
        nodes = {node["path"]: (node["type"], node["major"], node["minor"]) for node in found["nodes"]}
        assert nodes == {path: ("c", MAJOR, self.numbers[path]) for path in nodes}
        return Witnessed(tuple(found["devices"]), tuple(nodes))

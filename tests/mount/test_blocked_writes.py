"""Writes that the kernel blocks: the agent can be killed and replaced, and its successor finds the lock."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from tests.agent.kubelet.givingkubelet import kubelet_with_pod
from tests.mount.mounting import GPUVIRT, shell, until

pytestmark = pytest.mark.ring("mount")

ALLOCATED, BLOCKED, OTHER, THIRD = "0000:04:00.0", "0000:3b:00.0", "0000:86:00.0", "0000:af:00.0"
SIMULATED = "4xRTX2060"
LIMIT_S = 20.0
"""The longest time until an agent serves the other isolation units."""


class Mount:
    def __init__(self, folder: Path, server: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self._server = server

    def send(self, word: str, path: str) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        seen = (self.folder / path.lstrip("/")).resolve().relative_to(self.folder.resolve())  # as writers open it
        self._server.stdin.write(f"{word} /{seen}\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "done\n"

    def driver(self, address: str) -> str | None:
        link = self.folder / "sys/bus/pci/devices" / address / "driver"
        try:
            return link.readlink().name
        except FileNotFoundError:
            return None

    def notes(self) -> list[str]:
        """Return the codes of the agent's notes about the isolation unit whose write is blocked."""
        try:
            view = json.loads((self.folder / "run/gpuvirt/node.json").read_text())
        except (FileNotFoundError, ValueError):  # the file does not exist yet
            return []
        return [note["code"] for note in view["problems"] if note["subject"] == BLOCKED]


def is_written(folder: Path, path: str) -> bool:
    """Return whether a process has the file open."""
    target = str((folder / path.lstrip("/")).resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if str(link.readlink()) == target:
                return True
    return False


@contextmanager
def sleepy_mount(folder: Path) -> Iterator[Mount]:
    folder.mkdir()
    script = Path(__file__).with_name("sleepymount.py")
    command = [sys.executable, str(script), SIMULATED, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        try:
            yield Mount(folder, server)
        finally:
            server.terminate()


@contextmanager
def agent(folder: Path, kubelet: Path) -> Iterator["subprocess.Popen[bytes]"]:
    where = ["--host-root", str(folder / "host"), "--kubelet-dir", str(kubelet), "--config", str(folder / "node.yaml")]
    with subprocess.Popen([*GPUVIRT, "node", *where, "--listen", ""], stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_agent_killed_during_a_blocked_write_is_replaced(tmp_path: Path, short_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("mode: container\n")
    kubelet, clock = short_path / "k", RealClock()
    override = f"/sys/bus/pci/devices/{BLOCKED}/driver_override"
    with (
        sleepy_mount(tmp_path / "host") as host,
        kubelet_with_pod(kubelet, "nvidia.com/TU106_GEFORCE_RTX_2060", ALLOCATED),
    ):
        (host.folder / override.lstrip("/")).write_text("vfio-pci\n")  # gpuvirt removes it for the native driver
        host.send("sleep", override)
        with agent(tmp_path, kubelet) as first:
            until(lambda: host.driver(OTHER) == host.driver(THIRD) == "nvidia")
            until(lambda: is_written(host.folder, override))
            first.kill()
            first.wait()
        assert host.driver(BLOCKED) == "vfio-pci"
        done = shell(f"{' '.join(GPUVIRT)} vfio unbind {BLOCKED} --host-root host --kubelet-dir {kubelet}", tmp_path)
        assert done.returncode == 1
        written = (
            f"WriteBlocked: {BLOCKED} has been blocked in the kernel since the step: {BLOCKED}: driver_override = none"
        )
        assert written in " ".join(done.stdout.split())
        rebind = f"echo vfio-pci > devices/{OTHER}/driver_override; echo {OTHER} > drivers/nvidia/unbind"
        shell(f"{rebind}; echo {OTHER} > drivers_probe", host.folder / "sys/bus/pci")
        assert host.driver(OTHER) == "vfio-pci"
        with agent(tmp_path, kubelet) as second:
            began_s = clock.monotonic_s()
            until(lambda: host.driver(OTHER) == "nvidia")
            until(lambda: set(host.notes()) == {"WriteBlocked"})
            assert clock.monotonic_s() - began_s < LIMIT_S
            assert second.poll() is None
            assert host.driver(BLOCKED) == "vfio-pci"
            host.send("wake", override)
            until(lambda: host.driver(BLOCKED) == "nvidia")
            until(lambda: host.notes() == [])
        assert host.driver(ALLOCATED) == "vfio-pci"

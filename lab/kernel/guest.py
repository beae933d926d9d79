"""The life of a guest: booted, ready, and removed with its files, however the process that started it ends."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typing_extensions

import gpuvirt
from lab.kernel.channel import Channel
from lab.kernel.errors import LabError, NotBootedError
from lab.kernel.identities import give_identities
from lab.kernel.kit import Kit
from lab.kernel.qmp import Qmp
from lab.kernel.remote import GuestKernel
from lab.kernel.topology import DEVICES

BOOT_S = 150.0
"""A boot takes about 11 s, and much longer where other processes use the cores."""
LIFE_S = 4 * 3600
"""After this time a guest is killed. One serves a run, which takes over an hour on a slow computer."""
MEMORY_MIB = 512

COMMAND_LINE = "console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check mitigations=off intel_iommu=on"
"""no_timer_check: with busy cores, ticks come late, and the kernel would consider its timer broken."""

START_AGENT = """cd /mnt/share
PYTHONPATH=/mnt/share exec {python} -m lab.kernel.inside.agent >/mnt/share/agent.log 2>&1
"""
START_SHELL = """cd /mnt/share
export PYTHONPATH=/mnt/share
setsid /run/busybox cttyhack /bin/bash -i
exec /run/busybox poweroff -f
"""

WATCHER = 'read -r _; kill -s KILL -- "-$1"; rm -rf "$2"'
"""Waits until its standard input closes, and then kills the guest and removes its folder."""

HIDDEN = ("/proc", "/sys", "/dev", "/run", "/tmp")  # noqa: S108
"""The host's folders that the guest replaces by its own."""


class Guest:
    """A guest that is ready."""

    def __init__(self, channel: Channel, qmp: Qmp) -> None:
        self.channel = channel
        self._qmp = qmp
        self.kernel = GuestKernel(channel)

    def run(self, *command: str) -> str:
        """Run a program in the guest, and return its output."""
        return self.channel.text("run", *command)

    def pause(self) -> None:
        """Stop the guest's CPUs and its clock: an idle guest takes a twentieth of a CPU."""
        self._qmp.command("stop")

    def resume(self) -> None:
        """Let a paused guest go on."""
        self._qmp.command("cont")

    def restore(self) -> bool:
        """Reset all devices to their state after the boot; return whether that was possible."""
        try:
            return self.channel.texts("restore") == []
        except (LabError, OSError):
            return False


@contextmanager
def booted(kit: Kit) -> Iterator[Guest]:
    """Boot a guest for as long as the context lasts; raises NotBootedError."""
    with _work_folder() as folder, contextlib.ExitStack() as stack:
        python = _python_of_guest()
        _share(folder / "share", START_AGENT.format(python=python), kit)
        ours = {name: stack.enter_context(_listening(folder / name)) for name in ("qmp", "agent")}
        stack.enter_context(_running(_command(kit, folder), folder))
        qmp, agent = (_accepted(ours[name], folder, stack) for name in ("qmp", "agent"))
        channel = Channel(agent, lambda: _logs(folder))
        control = _begin(qmp)
        if not channel.wait_ready(BOOT_S):
            raise NotBootedError(f"the guest is not ready: {_logs(folder)}")
        yield Guest(channel, control)


def run_shell(kit: Kit) -> int:
    """Run a shell in a guest, on this terminal; return when it ends."""
    with _work_folder() as folder, _listening(folder / "qmp") as ours:
        _share(folder / "share", START_SHELL, kit)
        console = ("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console")
        with subprocess.Popen(_qemu(kit, folder, console)) as qemu, contextlib.ExitStack() as stack:
            try:
                _begin(_accepted(ours, folder, stack))
                return qemu.wait()
            finally:
                qemu.kill()


def _begin(connection: socket.socket) -> Qmp:
    """Start the guest, and return its control channel."""
    qmp = Qmp(connection)
    give_identities(qmp, DEVICES)
    qmp.command("cont")
    return qmp


def _command(kit: Kit, folder: Path) -> list[str]:
    console = (
        *("-serial", f"file:{folder}/console.log"),
        *("-chardev", f"socket,id=agent,path={folder}/agent,server=off"),
        *("-device", "virtio-serial-pci,bus=pcie.0,addr=0x4", "-device", "virtserialport,chardev=agent,name=agent"),
    )
    return ["timeout", "-k", "5", str(LIFE_S), *_qemu(kit, folder, console)]


def _qemu(kit: Kit, folder: Path, console: Sequence[str]) -> list[str]:
    shares = (
        ("root", Path("/"), ",readonly=on"),
        ("share", folder / "share", ""),
        ("modules", kit.modules, ",readonly=on"),
    )
    arguments = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    arguments += ["-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi", "-cpu", "max"]
    arguments += ["-smp", "1", "-m", str(MEMORY_MIB), "-kernel", str(kit.kernel), "-initrd", str(kit.initramfs)]
    arguments += ["-append", COMMAND_LINE]
    arguments += ["-S", "-qmp", f"unix:{folder}/qmp,server=off", "-monitor", "none", *console]
    for number, (tag, path, how) in enumerate(shares, 1):
        arguments += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{how}"]
        arguments += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0,addr={number:#x}"]
    for device in DEVICES:
        arguments += ["-device", device.argument]
    return arguments


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[None]:
    with (folder / "qemu.log").open("wb") as log:
        qemu = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "watcher", str(qemu.pid), str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    with watcher, qemu:
        try:
            yield
        finally:
            # Kill the group first: once QEMU has been waited for, another process may have its number.
            os.killpg(qemu.pid, signal.SIGKILL)
            watcher.kill()


@contextmanager
def _work_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpuvirt-guest-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(path))
        ours.listen(1)
        ours.settimeout(BOOT_S)
        yield ours


def _accepted(ours: socket.socket, folder: Path, stack: contextlib.ExitStack) -> socket.socket:
    try:
        connection = ours.accept()[0]
    except TimeoutError as error:
        raise LabError(f"QEMU does not start: {_logs(folder)}") from error
    connection.settimeout(None)
    return stack.enter_context(connection)


def _share(folder: Path, start: str, kit: Kit) -> None:
    """Copy what the guest needs where it can read it: it has its own `/tmp`, and the sources may be anywhere."""
    copy_programs(folder)
    for module in kit.samples.glob("*.ko"):
        shutil.copy(module, folder)
    (folder / "start").write_text(start)


def copy_programs(folder: Path) -> None:
    """Copy the guest's programs and all packages that they can import."""
    sources = {
        "gpuvirt": Path(gpuvirt.__file__).parent,
        "lab": Path(__file__).parent.parent,
        "msgspec": Path(msgspec.__file__).parent,
    }
    for name, source in sources.items():
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.ids"))
    # gpuvirt's hardware layer and gates need these besides msgspec; the guest may not see their folder.
    shutil.copy(typing_extensions.__file__, folder)


def _python_of_guest() -> str:
    """Return an interpreter that the guest can read: this one, without the virtual environment, or the system's."""
    ours = Path(sys.executable).resolve()
    return "/usr/bin/python3" if str(ours).startswith(HIDDEN) else str(ours)


def _logs(folder: Path) -> str:
    files = (folder / "qemu.log", folder / "console.log", folder / "share/agent.log")
    texts = (file.read_text("utf-8", "replace")[-2000:] for file in files if file.exists())
    return "\n".join(text for text in texts if text) or "its logs are empty"

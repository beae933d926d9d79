"""Starts a host with libvirtd, defines its VMs, and stops, kills and continues its programs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import UUID

FILES = {
    "/usr/sbin/libvirtd": "libvirt-daemon",
    "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so": "libvirt-daemon-driver-qemu",
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/usr/sbin/dmidecode": "dmidecode",
    "/usr/bin/virsh": "libvirt-clients",
}
"""The files that a host needs, with the Debian packages that have them."""
START_S = 10
ROOT = Path(__file__).parents[2]
PACKAGES = tuple(FILES.values())
QEMU = """
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
"""
"""No program of a usual host's is needed beside libvirtd and QEMU: systemd, AppArmor, virtlogd."""
DAEMON = """
listen_tls = 1
listen_tcp = 0
listen_addr = "127.0.0.1"
tls_port = "{port}"
ca_file = "{ca}"
cert_file = "{certificate}"
key_file = "{key}"
auth_unix_rw = "none"
unix_sock_group = "root"
unix_sock_rw_perms = "0700"
{more}
"""
DOMAIN = """
<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>16</memory>
  <os><type arch='x86_64'>hvm</type></os>
  <features><acpi/></features>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{devices}</devices>
  <qemu:commandline>{arguments}</qemu:commandline>
</domain>
"""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a host's TLS."""

    ca: Path
    certificate: Path
    key: Path


class LibvirtHost:
    """One running host."""

    def __init__(self, folder: Path, port: int, commands: IO[str], answers: IO[str]) -> None:
        """`host` starts its first process."""
        self.port = port
        self._folder = folder
        self._commands, self._answers = commands, answers

    def start(self) -> None:
        """Start libvirtd, and wait until it serves."""
        self._command("start")
        until_s = time.monotonic() + START_S
        while True:
            try:
                self.virsh("list", "--all")
            except subprocess.CalledProcessError as error:
                if time.monotonic() > until_s:
                    raise ChildProcessError(f"libvirtd does not serve: {error.stderr}") from error
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """Kill libvirtd; VMs run on."""
        self.signal("libvirtd", signal.SIGKILL)

    def signal(self, program: str, number: signal.Signals) -> None:
        """Send a signal to libvirtd, or to the QEMU of a VM."""
        self._command("signal", program, int(number))

    @contextmanager
    def stopped(self, program: str) -> Iterator[None]:
        """Stop libvirtd, or the QEMU of a VM, as one that hangs."""
        self.signal(program, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(program, signal.SIGCONT)

    @contextmanager
    def without_disk_space(self) -> Iterator[None]:
        """Let no memory of a VM be saved."""
        self._command("mount")
        try:
            yield
        finally:
            self._command("unmount")

    def define(self, name: str, uuid: UUID, devices: str = "", *arguments: str) -> None:
        """Define a VM without a disk, which is off; `arguments` are more ones of its QEMU."""
        file = self._folder / f"{name}.xml"
        shown = "".join(f"<qemu:arg value='{argument}'/>" for argument in arguments)
        file.write_text(DOMAIN.format(name=name, uuid=uuid, devices=devices, arguments=shown))
        self.virsh("define", str(file))

    def virsh(self, *arguments: str) -> str:
        """Run virsh as an admin of the host; raises CalledProcessError."""
        server = f"qemu+unix:///system?socket={self._folder}/run/libvirt-sock"
        command = ["/usr/bin/virsh", "--connect", server, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def _command(self, *words: object) -> None:
        self._commands.write(json.dumps(words) + "\n")
        self._commands.flush()
        if not self._answers.readline():
            raise ChildProcessError(f"the host has ended: see {self._folder}/libvirtd.log")


@contextmanager
def libvirt_host(folder: Path, tls: TlsFiles, *more: str) -> Iterator[LibvirtHost]:
    """Run a host whose files are in a new folder; its path must be short enough for sockets.

    `more` are lines of libvirtd.conf.
    """
    port = _free_port()
    _prepare(
        folder, DAEMON.format(port=port, ca=tls.ca, certificate=tls.certificate, key=tls.key, more="\n".join(more))
    )
    first = [sys.executable, "-m", "lab.libvirt.firstprocess", str(folder)]
    command = ["/usr/bin/unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", *first]
    with (
        (folder / "libvirtd.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        if process.stdin is None or process.stdout is None or not process.stdout.readline():
            raise ChildProcessError(f"the host did not start: {(folder / 'libvirtd.log').read_text()}")
        host = LibvirtHost(folder, port, process.stdin, process.stdout)
        try:
            host.start()
            yield host
        finally:
            process.kill()


def lacks() -> str | None:
    """Return why no host can be started here; None where one can."""
    if os.geteuid() != 0:
        return "not root"
    packages = [package for file, package in FILES.items() if not Path(file).exists()]
    return f"no {', '.join(packages)}" if packages else None


def _prepare(folder: Path, daemon: str) -> None:
    for name in ("etc", "lib", "run", "log", "cache"):
        (folder / name).mkdir()
    (folder / "etc" / "qemu.conf").write_text(QEMU)
    (folder / "etc" / "libvirtd.conf").write_text(daemon)
    # libvirtd starts without QEMU where this user is missing, which another package than its own creates.
    (folder / "passwd").write_text(
        Path("/etc/passwd").read_text() + "libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin\n"
    )
    (folder / "group").write_text(Path("/etc/group").read_text() + "libvirt-qemu:x:64055:\nkvm:x:64056:\n")
    stub = folder / "dmidecode"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port

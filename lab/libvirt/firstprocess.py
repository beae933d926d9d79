"""The first process of a host's namespaces: it gives libvirtd folders of its own, starts it, and signals programs.

`host` runs it by `unshare --mount --pid --kill-child`: with it all programs end. A line of standard input is a command,
a line of standard output says that it was carried out. libvirtd's folders are compiled in, and it accepts other users
than root in its own folders alone, so a mount namespace gives each host its own.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

MOUNTS = {
    "etc": "/etc/libvirt",
    "lib": "/var/lib/libvirt",
    "run": "/run/libvirt",
    "log": "/var/log/libvirt",
    "cache": "/var/cache/libvirt",
    "passwd": "/etc/passwd",
    "group": "/etc/group",
    "dmidecode": "/usr/sbin/dmidecode",
}
"""The files and folders of a host, and where its programs see them."""
LIBVIRTD = "/usr/sbin/libvirtd"
SAVES = "/var/lib/libvirt/qemu/save"


def main() -> None:
    """Obey commands until they end."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGCHLD, _reap)
    _mount(folder)
    daemon = 0
    print(flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["start"]:
                daemon = _started(folder)
            case ["signal", "libvirtd", int(number)]:
                os.kill(daemon, number)
                _settled(daemon, number)
            case ["signal", str(domain), int(number)]:
                pid = int((folder / "run" / "qemu" / f"{domain}.pid").read_text())
                os.kill(pid, number)
                _settled(pid, number)
            case ["mount"]:
                _run("/bin/mount", "-t", "tmpfs", "-o", "size=4k", "full", SAVES)
            case ["unmount"]:
                _run("/bin/umount", "--lazy", SAVES)
            case unknown:
                raise ValueError(unknown)
        print(flush=True)


def _mount(folder: Path) -> None:
    for name, target in MOUNTS.items():
        if (folder / name).is_dir():
            Path(target).mkdir(parents=True, exist_ok=True)
        _run("/bin/mount", "--bind", str(folder / name), target)


def _run(*command: str) -> None:
    # Not waited for by its number: `_reap` takes all that end.
    subprocess.run(command, check=False)


def _started(folder: Path) -> int:
    log = os.open(folder / "libvirtd.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2), (os.POSIX_SPAWN_CLOSE, 0)]
    return os.posix_spawn(
        LIBVIRTD, [LIBVIRTD, "--listen", "--pid-file", "/run/libvirt/libvirtd.pid"], os.environ, file_actions=actions
    )


def _settled(pid: int, number: int) -> None:
    """Wait until a signal has stopped or ended a process."""
    states = {signal.SIGSTOP: "T", signal.SIGCONT: "SRD"}.get(signal.Signals(number), "")
    while (state := _state(pid)) and state not in states:
        signal.sigtimedwait([signal.SIGUSR1], 0.01)


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""
    return "" if state == "Z" else state


def _reap(*_: object) -> None:
    """Take all processes that have ended: libvirtd waits until the kernel knows none of a QEMU's id."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()

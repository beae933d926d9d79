"""The programs of a simulated host as executables, which call the simulator that serves the host.

Each is a shell script beside a copy of its shell, so that it runs by its path and also after chroot. It writes its
command line to a file of the mount, and reads the program's results from there (`mounted.calls`).
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from gpuvirt.facts.pci import NVIDIA
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel


class VgpuManager(StrEnum):
    """Where the vGPU manager is installed."""

    HOST = "host"
    CONTAINER = "container"
    NONE = "none"

    @property
    def root(self) -> HostPath | None:
        """The root of its programs; None without programs."""
        roots = {VgpuManager.HOST: HostPath("/"), VgpuManager.CONTAINER: HostPath("/run/nvidia/driver")}
        return roots.get(self)


CALLS = ".simulator"
"""The file through which the programs call the simulator, in the root that contains the programs."""
MODPROBE = "/usr/sbin/modprobe"
LSPCI = "/usr/bin/lspci"
NVIDIAS = ("/usr/bin/nvidia-smi", "/usr/lib/nvidia/sriov-manage")
SHELL = ("sh", "cat")
_LIBRARY = re.compile(r"(?:^|=>)\s*(/\S+)", re.MULTILINE)

ASK = """#!/bin/sh
# {name} of a simulated host. The simulator answers with the exit code in a line, standard error, and standard output.
calls=${{0%/*}}/{up}/{calls}
if [ ! -e "$calls" ]; then
    echo "{name}: no $calls: the simulator that served this host has ended; see: gpuvirt sim mount --help" >&2
    exit 1
fi
exec 3<>"$calls"
printf '%s\\0' {name} "$@" >&3
read -r code <&3
cat <&3 >&2
cat <&3
exit "$code"
"""
SHOW = """#!/bin/sh
# lspci of this computer, which shows the PCI functions of a simulated host.
exec {lspci} -A linux-sysfs -O "sysfs.path=${{0%/*}}/../../sys/bus/pci" "$@"
"""
REFUSE = """#!/bin/sh
# {name} of a simulated host that is a snapshot in files.
cat >&2 <<'END'
{name}: this simulated host is a snapshot in files, on which no program acts: {why}
END
exit 1
"""


def roots(manager: VgpuManager) -> tuple[HostPath, ...]:
    """Return the roots that contain programs: the host's, and that of the vGPU manager's container."""
    return tuple(dict.fromkeys(root for root in (HostPath("/"), manager.root) if root is not None))


def search_path(root: Path, manager: VgpuManager) -> str:
    """Return the entries for PATH that find the programs of the host at `root` first."""
    programs = (*_programs(manager), (HostPath("/"), LSPCI))
    places = dict.fromkeys(_below(root, place, program).parent for place, program in programs)
    return ":".join(map(str, places))


def install(kernel: SimKernel, root: Path, manager: VgpuManager, *, refusal: str | None = None) -> None:
    """Write the programs of a host below `root`; with a `refusal`, the programs print it and fail.

    NVIDIA's programs are installed on hosts with an NVIDIA GPU, and lspci where this computer has it.
    """
    has_nvidia = any(function.id.vendor == NVIDIA for function in kernel.pci.functions.values())
    programs = [(place, name) for place, name in _programs(manager) if has_nvidia or name not in NVIDIAS]
    for place, program in programs:
        _write(_below(root, place, program), program, refusal)
    if (lspci := shutil.which("lspci")) is not None:
        _put(_below(root, HostPath("/"), LSPCI), SHOW.format(lspci=lspci))
    for place in {place for place, _ in programs}:
        _copy_shell(_below(root, place, "/"))


def _programs(manager: VgpuManager) -> Iterator[tuple[HostPath, str]]:
    """Yield the programs, each with the root that contains it."""
    if manager.root is not None:
        yield from ((manager.root, program) for program in NVIDIAS)
    yield HostPath("/"), MODPROBE


def _below(root: Path, place: HostPath, path: str) -> Path:
    return root / place.lstrip("/") / path.lstrip("/")


def _write(target: Path, program: str, refusal: str | None) -> None:
    up = "/".join([".."] * (program.count("/") - 1))
    text = ASK if refusal is None else REFUSE
    _put(target, text.format(name=target.name, up=up, calls=CALLS, why=refusal))


def _put(target: Path, script: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(script, encoding="utf-8")
    target.chmod(0o755)


def _copy_shell(root: Path) -> None:
    """Copy the shell and its libraries below a root, where chroot needs them to run a script."""
    found = [path for program in SHELL if (path := shutil.which(program, path="/bin:/usr/bin")) is not None]
    for path in found:
        _copy(path, root / "bin" / Path(path).name)
    for path in _libraries(found):
        _copy(path, root / path.lstrip("/"))


def _libraries(programs: Iterable[str]) -> tuple[str, ...]:
    try:
        done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)  # noqa: S607  by PATH
    except OSError:  # without ldd, the programs work by their paths only
        return ()
    return tuple(dict.fromkeys(path for path in _LIBRARY.findall(done.stdout) if not path.endswith(":")))  # its heads


def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)

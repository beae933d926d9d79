"""The process that makes the writes of a change: its answers, its open files, and its end."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate.agentlock import only_agent
from gpuvirt.agent.change.gate.gate import gate_at
from gpuvirt.errors import LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.tools import HostTools, run_program
from gpuvirt.hardware.access.writerkernel import WriterKernel, writing
from gpuvirt.paths import HostPath, HostRoots
from tests.mount.mounting import until

OVERRIDE = HostPath("/sys/driver_override")
SLOT = "0000:65:00"


@contextmanager
def writer(folder: Path, *kept: int) -> Iterator[WriterKernel]:
    for name in ("sys", "dev/vfio", "proc"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "sys/driver_override").touch()
    with writing(HostRoots.under(folder), HostTools(Path("/")), kept) as (kernel, _):
        yield kernel


def opened(pid: int) -> list[str]:
    links = list(Path(f"/proc/{pid}/fd").iterdir())
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


def writer_of(kernel: WriterKernel) -> int:
    (pid,) = kernel.pids - {os.getpid()}
    return pid


def test_the_writer_returns_the_kernels_errors(tmp_path: Path) -> None:
    with writer(tmp_path) as kernel:
        assert kernel.pids == {os.getpid()}, "the first write starts the process"
        kernel.write(OVERRIDE, b"\n")
        kernel.write(OVERRIDE, b"vfio-pci\0and more")
        assert (tmp_path / "sys/driver_override").read_bytes() == b"vfio-pci\0and more"
        with pytest.raises(FileNotFoundError) as missing:
            kernel.write(HostPath("/sys/nothing"), b"1")
        assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "/sys/nothing")
        pid = writer_of(kernel)
    assert not Path(f"/proc/{pid}").exists()


def test_the_writer_reads_attributes_that_may_block(tmp_path: Path) -> None:
    with writer(tmp_path) as kernel:
        (tmp_path / "sys/vendor").write_text("0x10de")
        assert kernel.read(HostPath("/sys/vendor")) == b"0x10de"
        assert kernel.pids == {os.getpid()}, "the caller reads this attribute itself"
        kernel.write(OVERRIDE, b"vfio-pci")
        assert kernel.read(OVERRIDE) == b"vfio-pci"
        assert kernel.read(OVERRIDE, limit=4) == b"vfio"
        with pytest.raises(FileNotFoundError) as missing:
            kernel.read(HostPath("/sys/nothing/driver_override"))
        assert missing.value.filename == "/sys/nothing/driver_override"


def test_the_writer_inherits_only_the_locks_of_the_change(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with (
        only_agent(own),
        socket.create_server(("127.0.0.1", 0)),
        gate_at(tmp_path / "gate").change(SLOT, lambda: (SLOT,)) as passed,
        writer(tmp_path, *passed.locks) as kernel,
    ):
        kernel.write(OVERRIDE, b"\n")
        found = opened(writer_of(kernel))
        assert [path for path in found if path.startswith("socket:")] == [found[-1]], "the socket of its requests"
        assert [path for path in found if path.startswith(str(tmp_path))] == [
            f"{tmp_path}/gate/{SLOT}.lock",
            f"{tmp_path}/gate/modules",
        ]
        shown = run_program(["/bin/ls", "-l", "/proc/self/fd"], 10, kept=tuple(passed.locks)).stdout
        assert [line.split(" -> ")[1] for line in shown.splitlines() if str(tmp_path) in line] == [
            f"{tmp_path}/gate/{SLOT}.lock",
            f"{tmp_path}/gate/modules",
        ]


def test_a_lease_is_open_only_in_the_writer(tmp_path: Path) -> None:
    with writer(tmp_path) as kernel:
        (node := tmp_path / "dev/vfio/12").touch()
        with kernel.lease(IommuGroup(12)):
            assert str(node) in opened(writer_of(kernel))
            assert str(node) not in opened(os.getpid())
        assert str(node) not in opened(writer_of(kernel))
        with pytest.raises(LeaseUnavailableError, match=r"/dev/vfio/13 can't be opened"), kernel.lease(IommuGroup(13)):
            pass


def test_a_killed_writer_is_an_error_with_the_path(tmp_path: Path) -> None:
    with writer(tmp_path) as kernel:
        kernel.write(OVERRIDE, b"\n")
        os.kill(writer_of(kernel), signal.SIGKILL)
        with pytest.raises(OSError, match="the process that makes the writes has ended") as ended:
            kernel.write(OVERRIDE, b"vfio-pci")
        assert ended.value.filename == OVERRIDE


def test_a_program_continues_after_its_caller_is_killed(tmp_path: Path) -> None:
    script = "touch began; while test ! -e go; do sleep 0.05; done; echo said && touch done"
    code = f"from gpuvirt.hardware.access.tools import run_program; run_program(['/bin/sh', '-c', {script!r}], None)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as caller:
        until((tmp_path / "began").exists)
        caller.kill()
    (tmp_path / "go").touch()
    until((tmp_path / "done").exists)

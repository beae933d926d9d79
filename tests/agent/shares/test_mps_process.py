"""A signal to the process that runs the MPS daemon ends no client of the daemon, however often and early it comes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.agent import mps
from gpuvirt.clock import RealClock
from gpuvirt.hardware.programs.mpsdaemon import MpsControl, MpsStart
from tests.agent.kubelet.kubeletnode import until
from tests.agent.shares.mpsdaemon import write_program

ROOT = Path(__file__).parents[3]
GPU = "GPU-a"


class Running:
    """A daemon that runs below gpuvirt's process, with a client that has memory."""

    def __init__(self, control: MpsControl, stopping: asyncio.Event, ended: "asyncio.Task[int]") -> None:
        self.control, self.stopping, self.ended = control, stopping, ended
        self.client: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    async def use(self) -> None:
        """Take memory as a client; the daemon has to be there."""
        reader, writer = self.client
        writer.write(b"alloc 100\n")
        assert await reader.readline() == b"ok\n"


def start_of(pipes: Path, refused_quits: int) -> MpsStart:
    command = (sys.executable, "-m", "tests.agent.shares.mpsdaemon", str(pipes), GPU, str(refused_quits))
    return MpsStart(command, {"PYTHONPATH": os.pathsep.join(sys.path)})


@asynccontextmanager
async def running(folder: Path, refused_quits: int = 0) -> AsyncIterator[Running]:
    write_program(folder)
    control, stopping = MpsControl((folder,), folder / "pipe"), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        start = start_of(control.pipes, refused_quits)
        ended = group.create_task(mps.run(start, control, RealClock(), stopping, again_s=0.05))
        found = Running(control, stopping, ended)
        await until((control.pipes / "control").is_socket)
        found.client = await asyncio.open_unix_connection(control.pipes / "control")
        found.client[1].write(f"client {GPU}=4915M\n".encode())
        await found.use()
        yield found
        found.client[1].close()
        stopping.set()


@pytest.mark.parametrize("refused_quits", [0, 2])
async def test_a_daemon_that_is_stopped_ends_once_its_last_client_has(short_path: Path, refused_quits: int) -> None:
    async with running(short_path, refused_quits) as found:
        found.stopping.set()
        for _ in range(20):
            await found.use()
            assert not found.ended.done()
            await RealClock().sleep(0.02)
        found.client[1].close()
        assert await found.ended == 0


async def test_a_daemon_that_ends_by_itself_ends_its_process(short_path: Path) -> None:
    async with running(short_path) as found:
        found.client[1].close()
        request = await asyncio.create_subprocess_exec(
            found.control.program, stdin=asyncio.subprocess.PIPE, env=found.control.environment
        )
        await request.communicate(b"quit\n")
        assert await found.ended == 0


def prolong(program: Path, pid: Path) -> None:
    """Let a program go on after it has ended, and write its pid into a file."""
    program.rename(program.with_name("short"))
    program.write_text(f'#!/bin/sh\necho $$ >{pid}\n"{program.with_name("short")}" "$@"\nexec sleep 100\n')
    program.chmod(0o755)


async def test_a_request_that_outlasts_the_daemon_is_ended_with_it(short_path: Path) -> None:
    pid = short_path / "pid"
    async with running(short_path) as found:
        prolong(Path(found.control.program), pid)
        found.stopping.set()
        await until(lambda: pid.is_file() and pid.read_text() != "")
        found.client[1].close()
        assert await found.ended == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_signals_end_no_client(short_path: Path) -> None:
    write_program(short_path)
    pipes = short_path / "pipe"
    start = start_of(pipes, 0)
    code = (
        "import asyncio, pathlib; from gpuvirt.agent import mps; from gpuvirt.clock import RealClock;"
        " from gpuvirt.hardware.programs.mpsdaemon import MpsControl;"
        " from gpuvirt.hardware.programs.mpsdaemon import MpsStart; mps.AGAIN_S = 0.05;"
        f" control = MpsControl((pathlib.Path({str(short_path)!r}),), pathlib.Path({str(pipes)!r}));"
        f" start = MpsStart({start.command!r}, {start.environment!r});"
        " raise SystemExit(asyncio.run(mps.run_until_unused(start, control, RealClock())))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    await until((pipes / "control").is_socket)
    reader, writer = await asyncio.open_unix_connection(pipes / "control")
    writer.write(f"client {GPU}=4915M\n".encode())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        for _ in range(5):
            writer.write(b"alloc 1\n")
            assert await reader.readline() == b"ok\n"
            assert process.returncode is None
            await RealClock().sleep(0.02)
    writer.close()
    assert await process.wait() == 0

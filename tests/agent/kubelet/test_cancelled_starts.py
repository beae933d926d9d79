"""A gRPC server that is cancelled while it starts or stops leaves nothing behind, at whatever point this happens."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet import pluginserver

SERVER = """
async def live(folder: Path) -> None:
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{folder}/server")
    try:
        await pluginserver.start(server)
    finally:
        await pluginserver.stop(server, 0.2)
"""
KUBELET = """
async def live(folder: Path) -> None:
    async with running(folder, RealClock()):
        await asyncio.sleep(60)
"""
CANCELLED = """
import asyncio, gc, sys
from pathlib import Path
import grpc.aio
from gpuvirt.clock import RealClock
from gpuvirt.agent.kubelet import pluginserver
from gpuvirt_sim.kubelet.kubelet import running
{life}
async def cancel(turns: tuple[int, ...], folder: Path) -> None:
    task = asyncio.create_task(live(folder))
    for number in turns:
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None

for turns in {turns}:
    asyncio.run(cancel(turns, Path(sys.argv[1])))
    gc.collect()
"""


TWICE = [(first, second) for first in range(1, 16) for second in range(1, 8)]
ONCE = [(turns,) for turns in range(1, 40)]


@pytest.mark.parametrize(("life", "turns"), [(SERVER, TWICE), (KUBELET, ONCE)], ids=["server", "kubelet"])
def test_a_server_that_is_cancelled_leaves_nothing(
    short_path: Path, life: str, turns: Sequence[tuple[int, ...]]
) -> None:
    """Its errors would come from the server's `__del__`, and hide where a test or a program only looks at results."""
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED.format(life=life, turns=turns), str(short_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


class SlowServer:
    """A server whose start takes until a test says so."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.started = False

    async def start(self) -> None:
        """Start."""
        self.begun.set()
        await self.may_end.wait()
        self.started = True


async def test_a_caller_that_is_cancelled_meanwhile_is_cancelled_once_the_server_has_started() -> None:
    server = SlowServer()
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(pluginserver.start(server))  # type: ignore[arg-type]  # it has what is called
        await server.begun.wait()
        starting.cancel()
        server.may_end.set()
    assert (server.started, starting.cancelled()) == (True, True)

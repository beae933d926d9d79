"""Runs NVIDIA's MPS daemon of a node as a child, so that what ends this process ends no client of the daemon.

SIGTERM ends NVIDIA's daemon at once, and with it all processes that use a GPU through it. So the daemon has a session
of its own, and this process asks it to end by its own command, as often as it takes, and waits for its last client.
"""

import asyncio
import signal
from asyncio.subprocess import Process
from contextlib import suppress

from gpuvirt.clock import Clock
from gpuvirt.hardware.programs.mpsdaemon import QUIT, MpsControl, MpsStart

AGAIN_S = 5.0
"""Between two requests: one that is under way makes the next fail, and one that has failed is forgotten."""


async def run_until_unused(start: MpsStart, control: MpsControl, clock: Clock) -> int:
    """Run the daemon to its end, and return its exit code; from SIGTERM or SIGINT on it is asked to end."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return await run(start, control, clock, stopping)


async def run(
    start: MpsStart, control: MpsControl, clock: Clock, stopping: asyncio.Event, again_s: float = AGAIN_S
) -> int:
    """Run the daemon to its end, and return its exit code; from `stopping` on it is asked to end."""
    daemon = await asyncio.create_subprocess_exec(*start.command, env=start.environment, start_new_session=True)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_ask_to_end(daemon, control, clock, stopping, again_s))
        exit_code = await daemon.wait()
        asking.cancel()
    return exit_code


async def _ask_to_end(
    daemon: Process, control: MpsControl, clock: Clock, stopping: asyncio.Event, again_s: float
) -> None:
    await stopping.wait()
    while daemon.returncode is None:
        request = await asyncio.create_subprocess_exec(
            control.program, stdin=asyncio.subprocess.PIPE, env=control.environment, start_new_session=True
        )
        try:
            await request.communicate(f"{QUIT}\n".encode())
        finally:
            if request.returncode is None:  # the daemon has ended meanwhile
                with suppress(ProcessLookupError):
                    request.kill()
                await request.wait()
        await clock.sleep(again_s)

"""Supervises the tasks of a process: restarts failed tasks after a pause, and ends the process at signals.

An essential task is a direct member of the process's TaskGroup: its failure ends the process, and the kubelet or
systemd starts the process again. Other tasks run in `keep_going`, so that the process survives their failure.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError

log = logging.getLogger(__name__)


def backoff_s(*, first_s: float = 0.2, factor: float = 2.0, most_s: float = 10.0) -> Iterator[float]:
    """Yield the pauses between attempts without end: 0.2, 0.4, 0.8 ... 10, 10 seconds."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * factor, most_s)


async def keep_going(name: str, work: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Run `work`; when it fails, log the error and run it again after a pause. Return when `work` returns.

    Only a defect of gpuvirt is logged with its traceback.
    """
    pauses = backoff_s()
    while True:
        began_s = clock.monotonic_s()
        try:
            await work()
        except GpuvirtError as error:
            log.error("the task failed and will be restarted: %s", error, extra={"task": name})  # noqa: TRY400  expected
        except Exception:
            log.exception("the task failed and will be restarted", extra={"task": name})
        else:
            return
        if clock.monotonic_s() - began_s > 60:
            pauses = backoff_s()
        await clock.sleep(next(pauses))


async def until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends, or until SIGTERM or SIGINT cancels it."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
    log.info("stopped")

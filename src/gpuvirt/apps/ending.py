"""How a process ends: at SIGTERM or SIGINT, with what it had open closed."""

import asyncio
import logging
import signal
from collections.abc import Coroutine

log = logging.getLogger(__name__)


async def until_told_to_stop(work: Coroutine[None, None, None]) -> None:
    """Do `work` until it ends, or SIGTERM or SIGINT cancels it."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
    log.info("stopped")

"""Controllers in processes of their own, which can be killed at any moment, and start within some milliseconds."""

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.schedules.controlled import controller
from tests.schedules.fastclock import FastClock


def _run(port: int, ca: Path, clock: tuple[float, datetime, float], output: Path) -> None:
    """Run a controller until the process is killed."""
    logging.basicConfig(filename=output, level=logging.INFO, format="%(process)d %(name)s %(levelname)s %(message)s")
    rate, begin, origin_s = clock
    asyncio.run(controller(port, ca, FastClock(rate, begin, origin_s)).run())


class Controllers:
    """Controllers, of which one runs at a time. They are forks of a process that has loaded their modules."""

    def __init__(self, port: int, ca: Path, clock: FastClock, output: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "gpuvirt_schedules.controllerpart"])
        self._arguments = (port, ca, (clock.rate, clock.begin, clock.origin_s), output)
        self.killed = 0
        self._running: BaseProcess | None = None

    def start(self) -> None:
        """Start a controller."""
        self._running = self._context.Process(target=_run, args=self._arguments, daemon=True)
        self._running.start()

    def kill(self) -> None:
        """Kill the controller by SIGKILL, whatever it is doing."""
        if self._running is not None:
            self._running.kill()
            self._running.join()
            self.killed += 1
            self._running = None

    @property
    def is_running(self) -> bool:
        """Whether a controller runs."""
        return self._running is not None and self._running.is_alive()


@contextmanager
def controllers(port: int, ca: Path, clock: FastClock, output: Path) -> Iterator[Controllers]:
    """Provide controllers, and kill the last one in the end."""
    found = Controllers(port, ca, clock, output)
    try:
        yield found
    finally:
        found.kill()

"""A kernel that blocks a caller without a sleeping thread: other strands continue meanwhile."""

import threading
from collections.abc import Callable

from typing_extensions import override

from gpuvirt_sim.files.blocking import Blocking
from tests.explore.scheduler import Scheduler


class _NoLock(threading.Condition):
    """The lock of a kernel whose callers never run at the same time."""

    @override
    def __enter__(self) -> bool:
        return True

    @override
    def __exit__(self, *_: object) -> None:
        return

    @override
    def notify_all(self) -> None:
        return


class ScheduledBlocking(Blocking):
    """Lets other strands continue while the kernel blocks a caller."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.condition = _NoLock()
        self._scheduler = scheduler

    @override
    def until(self, met: Callable[[], bool], what: str) -> None:
        if not met():
            self._scheduler.add_line(f"  asleep in the kernel: {what}")
        self._scheduler.wait(met, unkillable=True)

"""An event loop that runs its ready handles in the scheduler's order, in virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TypeVarTuple, Unpack

from typing_extensions import override

from gpuvirt_sim.clock import SimClock
from tests.explore.agenda import Option
from tests.explore.scheduler import KilledError, Process, Scheduler, Strand

Ts = TypeVarTuple("Ts")


class ExploredLoop(asyncio.BaseEventLoop):
    """The event loop of a process; it runs as a strand."""

    rests = 0
    """How often the loop has come to rest."""

    def __init__(self, scheduler: Scheduler, process: Process, clock: SimClock, *, reorders: bool) -> None:
        """With `reorders` any ready handle may be next, and each is a point; else each turn of the loop is one."""
        super().__init__()
        self.set_debug(False)
        self._handles: list[asyncio.Handle] = []
        self._scheduler = scheduler
        self._process = process
        self._clock = clock
        self._reorders = reorders
        self._picked = 0
        self._inside = False
        self._strand = Strand(process, f"{process.name}'s event loop", self._live, loop=self, picks=self._ways)
        self._strand.until = self._has_ready
        scheduler.spawn(self._strand)

    def _has_ready(self) -> bool:
        return bool(self._handles)

    def _ways(self) -> Sequence[Option]:
        """Return the options of the loop: each ready handle, or to continue the running handle."""
        strand, count = self._strand, len(self._handles)
        if self._inside or not self._reorders or count < 2:
            return (strand.way,)
        more = range(1, count)
        return (
            strand.way,
            *(Option(f"{strand.name}, #{index}", self._picker(index), strand, goes_on=True) for index in more),
        )

    def _picker(self, number: int) -> Callable[[], None]:
        def pick() -> None:
            if not self._inside:
                self._picked = number

        return pick

    def _live(self) -> None:
        self._strand.until = None
        try:
            while not self._process.dead:
                if not self._handles:
                    self.rests += 1
                    self._scheduler.wait(self._has_ready)
                elif self._reorders:
                    self._scheduler.point("the next handle")
                handle = self._handles.pop(min(self._picked, len(self._handles) - 1))
                self._picked = 0
                self._inside = True
                handle._run()
                self._inside = False
        finally:
            if self._process.dead:
                self._unwind()

    def _unwind(self) -> None:
        """End the tasks of a killed process where they are suspended, to close their files and leases."""
        self._inside = True
        while pending := [task for task in asyncio.all_tasks(self) if not task.done()]:
            for task in pending:
                task.cancel()
            while self._handles:
                self._handles.pop(0)._run()

    @override
    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._handles.append(handle)
        return handle

    @override
    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @override
    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.call_later(max(0.0, when - self.time()), lambda: None if handle.cancelled() else handle._run())
        return handle

    @override
    def time(self) -> float:
        return self._clock.monotonic_s()

    @override
    def call_exception_handler(self, context: dict[str, object]) -> None:
        """End the schedule with the exception of a callback, or of a task that no other task awaits."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not (self._process.dead or isinstance(error, KilledError)):
            self._scheduler.fail(error)

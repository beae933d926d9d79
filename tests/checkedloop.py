"""The event loop of tests: it refuses a call from another thread, as asyncio does in debug mode.

A timeout ends it, too. It is an exception of a signal's handler, which is raised in whichever task runs then: asyncio
keeps it as that task's, and the test would go on for ever.

The rest of that mode records a stack for each callback and future, which took a third of the time of all tests of the
agent, and warns of slow callbacks, which says nothing on a busy computer. `-o asyncio_debug=true` has it all for a run.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import TypeVarTuple

from typing_extensions import override

Ts = TypeVarTuple("Ts")


class OtherThreadError(RuntimeError):
    """A thread scheduled a callback on a loop that runs in another: the loop may wake too late, or lose it."""


class CheckedLoop(asyncio.SelectorEventLoop):
    """An event loop that only its own thread may call, but for `call_soon_threadsafe`."""

    _thread: int | None = None

    @override
    def run_forever(self) -> None:
        self._thread = threading.get_ident()
        try:
            with self._ended_by_timeouts():
                super().run_forever()
        finally:
            self._thread = None

    @contextmanager
    def _ended_by_timeouts(self) -> Iterator[None]:
        handler, raised = signal.getsignal(signal.SIGALRM), list[BaseException]()
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def alarm(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                self.stop()
                raise

        signal.signal(signal.SIGALRM, alarm)
        try:
            yield
            if raised:
                raise raised[0]
        finally:
            signal.signal(signal.SIGALRM, handler)

    @override
    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check()
        return super().call_soon(callback, *args, context=context)

    @override
    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check()
        return super().call_at(when, callback, *args, context=context)

    def _check(self) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            raise OtherThreadError("a loop was called by another thread than its own; expected call_soon_threadsafe")

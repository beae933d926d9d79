"""The event loop of tests: it refuses a call from another thread, as asyncio does in debug mode.

The rest of that mode records a stack for each callback and future, which took a third of the time of all tests of the
agent, and warns of slow callbacks, which says nothing on a busy computer. `-o asyncio_debug=true` has it all for a run.
"""

import asyncio
import threading
from collections.abc import Callable
from contextvars import Context
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
            super().run_forever()
        finally:
            self._thread = None

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

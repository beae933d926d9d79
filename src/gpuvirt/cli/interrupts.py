"""The effect of Ctrl-C on a process: a command cleans up and ends; while none runs, the process ends silently."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


def end_at_interrupt() -> None:
    """End the process at SIGINT, unless it is ignored, as below `nohup`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def taken_interrupts() -> Iterator[None]:
    """Have the command end by KeyboardInterrupt within, so that it can put in order what it has begun.

    Afterwards SIGINT ends the process at once: Python would print the traceback of whatever its end is doing.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield  # ignored, or the program around this one has its own handler
        return
    sys.excepthook = _silent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _silent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what no command has handled; an interrupt between its end and the process's needs no words."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)

"""Keeps Python's garbage collector out of a turn of decisions."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Have no garbage collection until the end; the next one comes a moment later.

    Decisions are frozen values without cycles, so a collection among them finds nothing. With very many vGPUs it would
    go through all that was decided so far again and again: a quarter of the turn.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

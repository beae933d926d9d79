"""Writes that another writer was faster with (409), done again from a fresh read."""

import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.failures import ApiError, ConflictError
from gpuvirt.tasks import backoff_s

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_TRIES = 10
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0


async def retried(
    attempt: Callable[[], Awaitable[T]], clock: Clock, conflicts: tuple[type[ApiError], ...] = (ConflictError,)
) -> T:
    """Return what `attempt` returns, which reads the object and writes it; a conflict begins another attempt.

    Raises the last conflict after MOST_TRIES attempts (5 s of pauses), and any other error at once.
    """
    for pause_s in islice(backoff_s(first_s=FIRST_PAUSE_S, most_s=MOST_PAUSE_S), MOST_TRIES - 1):
        try:
            return await attempt()
        except conflicts as error:
            log.debug("%s; it is tried again from a fresh read", error)
            await clock.sleep(pause_s)
    return await attempt()

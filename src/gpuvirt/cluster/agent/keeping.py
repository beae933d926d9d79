"""Writing what an object lacks until it does not: what every part of the agent does that has something there be so."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from gpuvirt.clock import Clock, Signal
from gpuvirt.cluster.failures import ApiError
from gpuvirt.tasks import backoff_s

P = TypeVar("P")

MOST_PAUSE_S = 30.0
Tell = Callable[[ApiError | None], None]
"""Takes what is wrong, None when nothing is any more."""


async def keep(
    lacking: Callable[[], P | None],
    write: Callable[[P], Awaitable[None]],
    tell: Tell,
    due: Signal,
    clock: Clock,
    random: Random,
) -> None:
    """Write for ever what is lacking, whenever `due` is set; `tell` takes what is wrong, and None when nothing is."""
    while True:
        pauses_s = backoff_s(most_s=MOST_PAUSE_S)
        while (patch := lacking()) is not None:
            try:
                await write(patch)
            except ApiError as error:
                tell(error)
                pause_s = next(pauses_s) * (0.5 + 0.5 * random.random())
                await clock.sleep(max(pause_s, error.retry_after_s))
            else:
                tell(None)
        await due.wait()

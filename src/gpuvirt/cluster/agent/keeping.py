"""Writing what an object of the node lacks until it does not: what all parts of the agent do that keep one."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from gpuvirt.clock import Clock, Signal
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.tasks import backoff_s

P = TypeVar("P")

MOST_PAUSE_S = 30.0
Tell = Callable[[ApiError | None], None]
"""Takes what is wrong, None when nothing is any more."""


@dataclass(frozen=True, slots=True)
class KeeperDependencies:
    """From where one node's objects are written."""

    client: Client
    node: str
    clock: Clock
    random: Random

    @property
    def key(self) -> ObjectKey:
        """The place of objects that are called as the node is."""
        return ObjectKey("", self.node)

    async def keep(
        self, lacking: Callable[[], P | None], write: Callable[[P], Awaitable[None]], tell: Tell, due: Signal
    ) -> None:
        """Write for ever what is lacking, whenever `due` is set; `tell` hears what is wrong, and when nothing is."""
        while True:
            pauses_s = backoff_s(most_s=MOST_PAUSE_S)
            while (patch := lacking()) is not None:
                try:
                    await write(patch)
                except ApiError as error:
                    tell(error)
                    pause_s = next(pauses_s) * (0.5 + 0.5 * self.random.random())
                    await self.clock.sleep(max(pause_s, error.retry_after_s))
                else:
                    tell(None)
            await due.wait()

"""The write loop of the agent's objects: write what an object lacks, retry after errors, wait for the next change."""

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
"""Reports an error of the API server, and None after a success."""


@dataclass(frozen=True, slots=True)
class KeeperDependencies:
    """What the writers of one node's objects need."""

    client: Client
    node: str
    clock: Clock
    random: Random

    @property
    def key(self) -> ObjectKey:
        """The key of cluster-scoped objects that have the node's name."""
        return ObjectKey("", self.node)

    async def keep(
        self, lacking: Callable[[], P | None], write: Callable[[P], Awaitable[None]], tell: Tell, due: Signal
    ) -> None:
        """Write what `lacking` returns until it returns None, and again whenever `due` is set; report each outcome."""
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

"""Lists and watches a collection for ever: the only loop of that kind.

`mirror` decides; here it is asked of the server, and waited. Whoever listens is told all that is known each time that
something of it is news, and nothing while nobody answers.
"""

import logging
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ApiError, GoneError, NotFoundError
from gpuvirt.cluster.mirror import Ended, Failed, Input, Mirror, News, pause_s, step
from gpuvirt.cluster.resources import KubernetesObject

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubernetesObject)

WATCH_S = 240, 300
"""How long a watch is asked for: from, to. The server ends it then, and it goes on where it was; so a new token is
presented in good time, and agents that were started together don't stay together."""


class Reflector(Generic[T]):
    """Follows one collection."""

    def __init__(self, client: Client, collection: Collection[T], clock: Clock, random: Random) -> None:
        self._client = client
        self._collection = collection
        self._clock = clock
        self._random = random
        self._mirror: Mirror[T] = Mirror()
        self._watching_since_s: float | None = None

    async def run(self, hear: Callable[[News[T]], None], tell: Callable[[ApiError | None], None]) -> None:
        """Follow for ever; `hear` takes what is news, `tell` what is wrong, and None when nothing is any more.

        Run again, as after a failure of whoever listens, it begins anew: all that there is is news.
        """
        self._mirror = Mirror()
        asked_for_s = 0.0
        while True:
            wait_s = max(pause_s(self._mirror, self._random.random()), asked_for_s)
            if wait_s:
                await self._clock.sleep(wait_s)
            asked_for_s = 0.0
            self._watching_since_s = None
            try:
                await self._go_on(hear, tell)
            except ApiError as error:
                expired, missing = isinstance(error, GoneError), isinstance(error, NotFoundError)
                self._take(Failed(self._watched_s(), expired=expired, missing=missing), hear)
                asked_for_s = error.retry_after_s
                if not expired:
                    tell(error)
                log.debug("%s", error, extra={"failures": self._mirror.failures})

    async def _go_on(self, hear: Callable[[News[T]], None], tell: Callable[[ApiError | None], None]) -> None:
        """List where that is due, else watch until the server ends it."""
        version = self._mirror.version
        if version is None:
            self._take(await self._client.list(self._collection), hear)
            tell(None)
            return
        for_s = self._random.randint(*WATCH_S)
        async with self._client.watch(self._collection, version, for_s=for_s) as events:
            self._watching_since_s = self._clock.monotonic_s()
            tell(None)
            async for event in events:
                self._take(event, hear)
        self._take(Ended(self._watched_s()), hear)

    def _watched_s(self) -> float:
        """Return for how long the watch of now was open."""
        return 0.0 if self._watching_since_s is None else self._clock.monotonic_s() - self._watching_since_s

    def _take(self, came: Input[T], hear: Callable[[News[T]], None]) -> None:
        after = step(self._mirror, came)
        self._mirror = after.mirror
        if after.news is not None:
            hear(after.news)

"""Lists and watches a collection for ever: the only loop of that kind.

`mirror` decides; here it is asked of the server, and waited. Whoever listens is told all that is known each time that
something of it is news, and nothing while nobody answers.
"""

import logging
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.cache import Cache, Delta, Ended, Failed, Input, pause_s, step
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ApiError, GoneError, NotFoundError
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
        self._cache: Cache[T] = Cache()
        self._watching_since_s: float | None = None

    async def run(self, observe: Callable[[Delta[T]], None], tell: Callable[[ApiError | None], None]) -> None:
        """Follow for ever; `hear` takes what is news, `tell` what is wrong, and None when nothing is any more.

        Run again, as after a failure of whoever listens, it begins again: all that there is is news.
        """
        self._cache = Cache()
        asked_for_s = 0.0
        while True:
            wait_s = max(pause_s(self._cache, self._random.random()), asked_for_s)
            if wait_s:
                await self._clock.sleep(wait_s)
            asked_for_s = 0.0
            self._watching_since_s = None
            try:
                await self._go_on(observe, tell)
            except ApiError as error:
                expired, missing = isinstance(error, GoneError), isinstance(error, NotFoundError)
                self._take(Failed(self._watched_s(), expired=expired, missing=missing), observe)
                asked_for_s = error.retry_after_s
                if not expired:
                    tell(error)
                log.debug("%s", error, extra={"failures": self._cache.failures})

    async def _go_on(self, observe: Callable[[Delta[T]], None], tell: Callable[[ApiError | None], None]) -> None:
        """List where that is due, else watch until the server ends it."""
        version = self._cache.version
        if version is None:
            self._take(await self._client.list(self._collection), observe)
            tell(None)
            return
        for_s = self._random.randint(*WATCH_S)
        async with self._client.watch(self._collection, version, for_s=for_s) as events:
            self._watching_since_s = self._clock.monotonic_s()
            tell(None)
            async for event in events:
                self._take(event, observe)
        self._take(Ended(self._watched_s()), observe)

    def _watched_s(self) -> float:
        """Return for how long the watch of now was open."""
        return 0.0 if self._watching_since_s is None else self._clock.monotonic_s() - self._watching_since_s

    def _take(self, came: Input[T], observe: Callable[[Delta[T]], None]) -> None:
        after = step(self._cache, came)
        self._cache = after.cache
        if after.delta is not None:
            observe(after.delta)

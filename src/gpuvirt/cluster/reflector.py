"""Lists and watches a collection for ever: the only such loop of gpuvirt.

`cache` decides what to do next; the reflector makes the requests and the pauses. The consumer gets a delta with all
objects each time that one has changed, and nothing while the API server does not answer.
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
"""The range of the requested duration of a watch. The server ends the watch then, and the next one continues at the
same version. So a renewed token is sent soon, and agents that were started together spread over time."""


class Reflector(Generic[T]):
    """Keeps the cache of one collection up to date."""

    def __init__(self, client: Client, collection: Collection[T], clock: Clock, random: Random) -> None:
        self._client = client
        self._collection = collection
        self._clock = clock
        self._random = random
        self._cache: Cache[T] = Cache()
        self._watching_since_s: float | None = None

    async def run(self, observe: Callable[[Delta[T]], None], report: Callable[[ApiError | None], None]) -> None:
        """Follow the collection for ever; `observe` gets each delta, `report` each error, and None after a success.

        A second run, such as after a failure of the consumer, lists again. It reports all objects as changed, and those
        as removed that are gone since the first run.
        """
        self._cache = Cache(self._cache.objects, restarted=True)
        asked_for_s = 0.0
        while True:
            wait_s = max(pause_s(self._cache, self._random.random()), asked_for_s)
            if wait_s:
                await self._clock.sleep(wait_s)
            asked_for_s = 0.0
            self._watching_since_s = None
            try:
                await self._go_on(observe, report)
            except ApiError as error:
                expired, missing = isinstance(error, GoneError), isinstance(error, NotFoundError)
                self._take(Failed(self._watched_s(), expired=expired, missing=missing), observe)
                asked_for_s = error.retry_after_s
                if not expired:
                    report(error)
                log.debug("%s", error, extra={"failures": self._cache.failures})

    async def _go_on(self, observe: Callable[[Delta[T]], None], report: Callable[[ApiError | None], None]) -> None:
        """List the collection if that is due; otherwise watch it until the server ends the watch."""
        version = self._cache.version
        if version is None:
            self._take(await self._client.list(self._collection), observe)
            report(None)
            return
        for_s = self._random.randint(*WATCH_S)
        async with self._client.watch(self._collection, version, for_s=for_s) as events:
            self._watching_since_s = self._clock.monotonic_s()
            report(None)
            async for event in events:
                self._take(event, observe)
        self._take(Ended(self._watched_s()), observe)

    def _watched_s(self) -> float:
        """Return for how long the current watch has been open."""
        return 0.0 if self._watching_since_s is None else self._clock.monotonic_s() - self._watching_since_s

    def _take(self, received: Input[T], observe: Callable[[Delta[T]], None]) -> None:
        after = step(self._cache, received)
        self._cache = after.cache
        if after.delta is not None:
            observe(after.delta)

"""Lists and watches a collection until cancelled: the only such loop of gpuvirt.

`cache` decides what to do next; the reflector makes the requests and the pauses. The consumer gets a delta with all
objects each time that one has changed, and nothing while the API server does not answer.
"""

import logging
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Generic, TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.kube.apigroups import ApiGroups
from gpuvirt.kube.cache import Cache, Delta, Input, WatchEnded, WatchFailed, pause_s, step
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ApiError, GoneError, NotFoundError, NotStreamedError
from gpuvirt.kube.resources import KubernetesObject
from gpuvirt.kube.watchevents import Events

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubernetesObject)

WATCH_S = 240, 300
"""The range of the requested duration of a watch. The server ends the watch then, and the next one continues at the
same version. So a renewed token is sent soon, and agents that were started together spread over time."""

EARLY_S = 5.0
"""A watch that ends sooner than requested by more than this was cut by the server."""


class Waits(msgspec.Struct, frozen=True):
    """The delays of a reflector's observations."""

    spread_s: float = 0.0
    """The time over which many reflectors come back after the server has cut their watches."""
    gather_s: float = 0.0
    """For how long events in a stream gather, to be observed together. One after a longer silence does not wait."""


NO_WAITS = Waits()


class Reflector(Generic[T]):
    """Keeps the cache of one collection up to date."""

    def __init__(
        self,
        client: Client,
        collection: Collection[T],
        clock: Clock,
        random: Random,
        *,
        waits: Waits = NO_WAITS,
        groups: ApiGroups | None = None,
    ) -> None:
        """`groups` tells when to list a kind again that the server lacks; without it, that is done after a pause."""
        self._client = client
        self._collection = collection
        self._clock = clock
        self._random = random
        self._waits = waits
        self._groups = groups
        self._streams = True
        """Whether the server is believed to have streaming lists."""
        self._cache: Cache[T] = Cache()
        self._watching_since_s: float | None = None

    async def run(self, observe: Callable[[Delta[T]], None], report: Callable[[ApiError | None], None]) -> None:
        """Follow the collection until cancelled; `observe` gets each delta, `report` each error, None after a success.

        A second run, such as after a failure of the consumer, lists again. It reports all objects as changed, and those
        as removed that are gone since the first run.
        """
        self._cache = Cache(self._cache.objects, restarted=True)
        asked_for_s, is_missing = 0.0, False
        while True:
            wait_s = max(pause_s(self._cache, self._random.random(), self._waits.spread_s), asked_for_s)
            if wait_s:
                await self._clock.sleep(wait_s)
            if is_missing and self._groups is not None:
                await self._groups.until_possible(self._collection.resource)
            asked_for_s, is_missing = 0.0, False
            self._watching_since_s = None
            try:
                await self._go_on(observe, report)
            except ApiError as error:
                expired, is_missing = isinstance(error, GoneError), isinstance(error, NotFoundError)
                self._take(WatchFailed(self._watched_s(), expired=expired, missing=is_missing), observe)
                asked_for_s = error.retry_after_s * (1.0 + self._random.random())
                if not expired:
                    report(error)
                log.debug("%s", error, extra={"failures": self._cache.failures})

    async def _go_on(self, observe: Callable[[Delta[T]], None], report: Callable[[ApiError | None], None]) -> None:
        """List the collection if that is due, and watch it until the server ends the watch."""
        version, gather_s = self._cache.version, self._waits.gather_s
        for_s = self._random.randint(*WATCH_S)
        if version is not None:
            async with self._client.watch(self._collection, version, for_s=for_s, gather_s=gather_s) as events:
                await self._watch(events, observe, report)
        elif self._streams:
            try:
                async with self._client.stream(self._collection, for_s=for_s, gather_s=gather_s) as (listed, events):
                    self._take(listed, observe)
                    await self._watch(events, observe, report)
            except NotStreamedError as error:
                log.debug("%s; listing by pages", error)
                self._streams = False
                return
        else:
            self._take(await self._client.list(self._collection), observe)
            report(None)
            return
        watched_s = self._watched_s()
        self._take(WatchEnded(watched_s, early=watched_s < for_s - EARLY_S), observe)

    async def _watch(
        self,
        events: AsyncIterator[Events[T]],
        observe: Callable[[Delta[T]], None],
        report: Callable[[ApiError | None], None],
    ) -> None:
        self._watching_since_s = self._clock.monotonic_s()
        report(None)
        async for together in events:
            self._take(together, observe)

    def _watched_s(self) -> float:
        """Return for how long the current watch has been open."""
        return 0.0 if self._watching_since_s is None else self._clock.monotonic_s() - self._watching_since_s

    def _take(self, received: Input[T], observe: Callable[[Delta[T]], None]) -> None:
        after = step(self._cache, received)
        self._cache = after.cache
        if after.delta is not None:
            observe(after.delta)

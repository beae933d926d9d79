"""Lists and watches a collection until cancelled, and tells when a kind that the API server lacked may exist.

`cache` decides what to do next; the reflector makes the requests and the pauses. The consumer gets a delta with all
objects each time that one has changed, and nothing while the API server does not answer.

The list of groups never proves that a kind is absent: a server that has just started lists few groups, but answers 503
for their kinds. So only a list of the kind itself, answered by 404, does. A server that does not answer what groups it
has leads to a list of the kind, too. A watch of CustomResourceDefinitions would need a right on all of them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Generic, TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.kube.cache import Cache, Delta, Input, WatchEnded, WatchFailed, pause_s, step
from gpuvirt.kube.client import Client, GroupVersion
from gpuvirt.kube.failures import ApiError, GoneError, NotFoundError, NotStreamedError
from gpuvirt.kube.resources import Collection, KubernetesObject, Resource
from gpuvirt.kube.watchevents import Events

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""The longest pause between two requests: a new kind is noticed within it."""


class ApiGroups:
    """The API groups of a server, for all reflectors whose kinds it lacks."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._served: frozenset[GroupVersion] | None = None
        """The groups by the last answer; None if there was none."""
        self._due_s: float | None = None
        """When to ask again; None if the server was never asked."""
        self._pause_s = FIRST_PAUSE_S
        self._asking = asyncio.Lock()

    async def until_possible(self, resource: Resource) -> None:
        """Return once the server has the group of a kind, or does not say which groups it has.

        The core kinds are in no group, and each server has them: a 404 for one comes from a proxy.
        """
        while resource.group:
            await self._refresh()
            if self._served is None or GroupVersion(resource.group, resource.version) in self._served:
                return
            await self._clock.sleep(self._left_s())

    def _left_s(self) -> float:
        return 0.0 if self._due_s is None else max(0.0, self._due_s - self._clock.monotonic_s())

    async def _refresh(self) -> None:
        """Ask for the groups if that is due. The pauses grow while the groups stay the same."""
        async with self._asking:
            if self._left_s():
                return
            try:
                served = await self._client.group_versions()
            except ApiError as error:
                log.debug("%s; the kinds are listed instead", error)
                served = None
            changed = self._due_s is None or served != self._served
            self._pause_s = FIRST_PAUSE_S if changed else min(self._pause_s * 2.0, MOST_PAUSE_S)
            self._served, self._due_s = served, self._clock.monotonic_s() + self._pause_s


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

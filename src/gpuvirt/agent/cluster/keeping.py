"""Keeps the agent's objects: writes missing values, retries after errors, waits for the next change.

An object is watched and written at the same time. Watch events and the answers to writes come by different connections,
so an answer may arrive after the watch has reported the write, and even later changes. The later version of both
counts, since the watch does not repeat it.
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Generic, TypeVar

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import KubernetesObject, is_newer
from gpuvirt.tasks import backoff_s

T = TypeVar("T", bound=KubernetesObject)


class Observation(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """One observation of the object. Each is distinct (compared by identity), even if two have the same content."""

    item: T | None
    """None if the object does not exist."""


class ObservedObject(Generic[T]):
    """The latest observed state of one object."""

    def __init__(self) -> None:
        self.latest: Observation[T] | None = None
        """The latest observation; None before the first."""

    @property
    def item(self) -> T | None:
        """The object; None if it does not exist or has not been observed."""
        return self.latest.item if self.latest is not None else None

    def observe(self, item: T | None) -> None:
        """Store an observation of the watch."""
        self.latest = Observation(item)

    def answer(self, before: Observation[T] | None, item: T) -> None:
        """Store the answer to a write that began after the observation `before`, unless a later version is known."""
        now = self.latest
        if now is before or (now is not None and now.item is not None and is_newer(item, now.item)):
            self.latest = Observation(item)

    def doubt(self, before: Observation[T] | None) -> None:
        """Forget the observation `before` after a conflicting write; the watch reports the actual state, or has."""
        if self.latest is before:
            self.latest = None


P = TypeVar("P")

MOST_PAUSE_S = 30.0
SPREAD_S = 5.0
"""The time over which the agents of a cluster come back after the API server has cut their watches."""
ReportOutcome = Callable[[ApiError | None], None]
"""Reports an error of the API server, and None after a success."""


class KeeperDependencies(msgspec.Struct, frozen=True):
    """The dependencies of the writers of one node's objects."""

    client: Client
    node: str
    clock: Clock
    random: Random

    @property
    def key(self) -> ObjectKey:
        """The key of cluster-scoped objects that have the node's name."""
        return ObjectKey("", self.node)

    async def keep(
        self, lacking: Callable[[], P | None], write: Callable[[P], Awaitable[None]], report: ReportOutcome, due: Signal
    ) -> None:
        """Write what `lacking` returns until it returns None, and again whenever `due` is set; report each outcome."""
        while True:
            pauses_s = backoff_s(most_s=MOST_PAUSE_S)
            while (patch := lacking()) is not None:
                try:
                    await write(patch)
                except ApiError as error:
                    report(error)
                    chance = self.random.random()
                    pause_s = next(pauses_s) * (0.5 + 0.5 * chance)
                    await self.clock.sleep(max(pause_s, error.retry_after_s * (1.0 + chance)))
                else:
                    report(None)
            await due.wait()

"""The cache of a listed and watched collection: a pure state machine.

A collection is unknown until it has been listed completely once. From then on it stays known: while the API server does
not answer, the cache keeps its last state. The next list shows deletions that the watch has missed. Source of the
rules: Kubernetes' API concepts, "Efficient detection of changes" and "410 Gone".
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.kube.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.kube.resources import KubernetesObject
from gpuvirt.kube.watchevents import Events, EventType, Listed

T = TypeVar("T", bound=KubernetesObject)

FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 30.0
SHORT_WATCH_S = 5.0
"""A watch that ends sooner counts as a failure, so that there is a pause before the next one."""
WATCHES_A_LIST = 8
"""The number of watches after which the collection is listed again. A server that was restored from a backup continues
with the versions of the backup, and a watch from a later version gets no events."""


class Delta(msgspec.Struct, Generic[T], frozen=True):
    """All objects of the collection, and the keys of those that have changed since the previous delta."""

    objects: Mapping[ObjectKey, T]
    changed: frozenset[ObjectKey] = frozenset()
    removed: frozenset[ObjectKey] = frozenset()


class WatchEnded(msgspec.Struct, frozen=True):
    """The API server has ended a watch, which is normal."""

    after_s: float
    early: bool = False
    """Whether it was to last longer: such a server stops, and ends the watches of all agents at once."""


class WatchFailed(msgspec.Struct, frozen=True):
    """A list or a watch has failed."""

    after_s: float = 0.0
    """For how long the watch was open."""
    expired: bool = False
    """Whether the server no longer keeps the version to watch from."""
    missing: bool = False
    """Whether the server has no such kind."""


class Cache(msgspec.Struct, Generic[T], frozen=True):
    """The known objects, the version to continue from, and the recent failures."""

    objects: ObjectMap[T] | None = None
    """None until the collection has been listed."""
    version: str | None = None
    """The version to watch from; None if the collection must be listed first."""
    failures: int = 0
    """Failures since the last successful watch."""
    failed: bool = False
    """Whether the last list or watch failed. Only then is there a pause before the next."""
    cut: bool = False
    """Whether the server has cut an open watch, as it does to all agents when it stops."""
    watches: int = 0
    """Watches since the last list."""
    doubted: bool = False
    """Whether the server reported since the last list that the kind does not exist. The next list is then reported as a
    delta even if no object has changed."""
    restarted: bool = False
    """Whether the consumer may have lost objects: the next list is then reported as changes of all of them."""


Input = Listed[T] | Events[T] | WatchEnded | WatchFailed


class CacheStep(msgspec.Struct, Generic[T], frozen=True):
    """The cache after an input, and the delta for the consumer."""

    cache: Cache[T]
    delta: Delta[T] | None = None
    """None if nothing has changed."""


def step(cache: Cache[T], received: Input[T]) -> CacheStep[T]:
    """Return the cache after an input, and the changes."""
    match received:
        case Listed():
            return _listed(cache, received)
        case tuple():
            return _watched(cache, received)
        case WatchEnded(after_s=after_s, early=early):
            failed = after_s < SHORT_WATCH_S
            failures = cache.failures + 1 if failed else 0
            watches = cache.watches + 1
            version = None if watches >= WATCHES_A_LIST else cache.version
            after = replace(cache, failed=failed, failures=failures, cut=early, watches=watches, version=version)
            return CacheStep(after)
        case WatchFailed(after_s=after_s, expired=expired, missing=missing):
            failures = cache.failures + 1 if after_s < SHORT_WATCH_S else 1
            version = None if expired or missing else cache.version
            doubted = cache.doubted or missing
            cut = cache.cut or after_s >= SHORT_WATCH_S
            return CacheStep(replace(cache, failed=True, failures=failures, cut=cut, version=version, doubted=doubted))


def pause_s(cache: Cache[T], chance: float, spread_s: float = 0.0) -> float:
    """Return the pause before the next list or watch; `chance`, from 0 to 1, spreads many agents over time.

    After the server has cut their watches, they come back within `spread_s`.
    """
    cut_s = spread_s * chance if cache.cut else 0.0
    if not cache.failed:
        return cut_s
    longest_s = min(FIRST_PAUSE_S * 2.0 ** min(cache.failures - 1, 10), MOST_PAUSE_S)
    return max(longest_s * (0.5 + 0.5 * chance), cut_s)


def _listed(cache: Cache[T], listed: Listed[T]) -> CacheStep[T]:
    objects = ObjectMap.of({key_of(item): item for item in listed.items})
    before: Mapping[ObjectKey, T] = cache.objects or {}
    changed = frozenset(key for key, item in objects.items() if cache.restarted or before.get(key) != item)
    removed = frozenset(before.keys() - objects.keys())
    # Failures count until a watch succeeds: a server may answer lists and fail every watch.
    after = Cache(objects, listed.version, cache.failures)
    is_change = cache.objects is None or cache.doubted or cache.restarted or changed or removed
    return CacheStep(after, Delta(objects, changed, removed) if is_change else None)


def _watched(cache: Cache[T], events: Events[T]) -> CacheStep[T]:
    versions = [event.version for event in events if event.version]
    version = versions[-1] if versions else cache.version
    observed = replace(cache, version=version, failures=0, failed=False, cut=False)
    before = cache.objects
    if before is None:
        return CacheStep(observed)
    last = {key_of(event.item): event for event in events if event.item is not None}
    is_removed = {key: event.type is EventType.DELETED for key, event in last.items()}
    changed = {
        key: event.item
        for key, event in last.items()
        if event.item is not None and not is_removed[key] and before.get(key) != event.item
    }
    removed = frozenset(key for key in last if is_removed[key] and key in before)
    if not changed and not removed:
        return CacheStep(observed)
    objects = before.with_changes(changed, removed)
    return CacheStep(replace(observed, objects=objects), Delta(objects, frozenset(changed), removed))

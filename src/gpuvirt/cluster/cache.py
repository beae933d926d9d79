"""What a list and a watch have said of a collection, and what to do next: a pure state machine.

A collection is unheard until it was listed whole once, and never again after that: while nobody answers, it is as it
was. Deletions that happened unseen come out of the next list. Source of the rules: Kubernetes' API concepts, "Efficient
detection of changes" and "410 Gone".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gpuvirt.cluster.client import EventType, Listed, Watched
from gpuvirt.cluster.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.cluster.resources import KubernetesObject

T = TypeVar("T", bound=KubernetesObject)

FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 30.0
SHORT_WATCH_S = 5.0
"""A watch that ends sooner, without a word, counts as a failure: or it would be asked for without pause."""
WATCHES_A_LIST = 8
"""After so many watches it is listed again: a server restored from a backup counts versions from the backup's on, and
tells a watch that waits for later ones nothing."""


@dataclass(frozen=True, slots=True)
class Delta(Generic[T]):
    """All objects as they are known now, and which of them are other than in the news before."""

    objects: Mapping[ObjectKey, T]
    changed: frozenset[ObjectKey] = frozenset()
    removed: frozenset[ObjectKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Ended:
    """The server has ended a watch, as it does."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A list or a watch has failed."""

    after_s: float = 0.0
    """How long the watch had gone well."""
    expired: bool = False
    """The version to go on from is no longer kept."""
    missing: bool = False
    """The server knows no such kind."""


@dataclass(frozen=True, slots=True)
class Cache(Generic[T]):
    """What is known, where to go on from, and how that has gone lately."""

    objects: ObjectMap[T] | None = None
    """None until they were listed."""
    version: str | None = None
    """What to watch from; None where they are to be listed first."""
    failures: int = 0
    """Failures since a watch last went well."""
    failed: bool = False
    """Whether the last list or watch did: only then is there a pause before the next."""
    watches: int = 0
    """Watches since the last list."""
    doubted: bool = False
    """Whether the kind was said not to be there since the last list: what is listed next is news, be it as before."""


Input = Listed[T] | Watched[T] | Ended | Failed


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """What an input leads to."""

    cache: Cache[T]
    delta: Delta[T] | None = None
    """None where nothing is news."""


def step(cache: Cache[T], came: Input[T]) -> Step[T]:
    """Return what is known after `came`, and what of it is news."""
    match came:
        case Listed():
            return _listed(cache, came)
        case Watched():
            return _watched(cache, came)
        case Ended(after_s=after_s):
            failed = after_s < SHORT_WATCH_S
            failures = cache.failures + 1 if failed else 0
            watches = cache.watches + 1
            version = None if watches >= WATCHES_A_LIST else cache.version
            return Step(replace(cache, failed=failed, failures=failures, watches=watches, version=version))
        case Failed(after_s=after_s, expired=expired, missing=missing):
            failures = cache.failures + 1 if after_s < SHORT_WATCH_S else 1
            version = None if expired or missing else cache.version
            doubted = cache.doubted or missing
            return Step(replace(cache, failed=True, failures=failures, version=version, doubted=doubted))


def pause_s(cache: Cache[T], chance: float) -> float:
    """Return how long to wait before the next list or watch; `chance`, from 0 to 1, keeps many agents apart."""
    if not cache.failed:
        return 0.0
    longest_s = min(FIRST_PAUSE_S * 2.0 ** min(cache.failures - 1, 10), MOST_PAUSE_S)
    return longest_s * (0.5 + 0.5 * chance)


def _listed(cache: Cache[T], listed: Listed[T]) -> Step[T]:
    objects = ObjectMap.of({key_of(item): item for item in listed.items})
    before: Mapping[ObjectKey, T] = cache.objects or {}
    changed = frozenset(key for key, item in objects.items() if before.get(key) != item)
    removed = frozenset(before.keys() - objects.keys())
    # Failures stay until a watch went well: a server may list, and fail every watch.
    after = Cache(objects, listed.version, cache.failures)
    is_change = cache.objects is None or cache.doubted or changed or removed
    return Step(after, Delta(objects, changed, removed) if is_change else None)


def _watched(cache: Cache[T], watched: Watched[T]) -> Step[T]:
    observed = replace(cache, version=watched.version or cache.version, failures=0, failed=False)
    if watched.item is None or cache.objects is None:
        return Step(observed)
    key, objects = key_of(watched.item), cache.objects
    known = objects.get(key)
    if watched.type is EventType.DELETED:
        if known is None:
            return Step(observed)
        objects = objects.without(key)
        return Step(replace(observed, objects=objects), Delta(objects, removed=frozenset({key})))
    if known == watched.item:
        return Step(observed)
    objects = objects.with_object(key, watched.item)
    return Step(replace(observed, objects=objects), Delta(objects, changed=frozenset({key})))

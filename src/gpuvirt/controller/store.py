"""A store of one collection's objects: those that its reflector observed, and newer ones that writes returned."""

import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Generic, Protocol, TypeVar

from gpuvirt.clock import Clock, Signal
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, NotFoundError
from gpuvirt.kube.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.kube.reflector import ApiGroups, Reflector, Waits
from gpuvirt.kube.resources import Collection, KubernetesObject, Resource, is_newer

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubernetesObject)

WAITS = Waits(gather_s=0.1)
"""The heartbeats of thousands of nodes are a stream: read together, they cost a third of each alone."""

Objects = Mapping[ObjectKey, T]


class AnyStore(Protocol):
    """A store of objects of any kind."""

    @property
    def resource(self) -> Resource:
        """The collection of the stored objects."""
        ...

    @property
    def is_observed(self) -> bool:
        """Whether the collection has been listed."""
        ...

    @property
    def problem(self) -> ApiError | None:
        """Why the collection cannot be watched; None if it can."""
        ...

    def drop(self, key: ObjectKey) -> None:
        """Remove an object that was deleted."""
        ...

    def observe_error(self, error: ApiError | None, /) -> None:
        """Store the reflector's error; None once it has recovered."""
        ...

    async def follow(self, client: Client, clock: Clock, random: Random, groups: ApiGroups) -> None:
        """List and watch the collection until cancelled."""
        ...


class Store(Generic[T]):
    """The observed objects of one collection."""

    def __init__(
        self,
        collection: Collection[T],
        changed: Signal,
        also: Callable[[Delta[T]], None] | None = None,
        reads: Callable[[T], object] | None = None,
    ) -> None:
        """Make an empty store; `also` is called first with each delta.

        `reads` returns the fields that the controller reads of an object. A change of other fields, such as by a node's
        heartbeat, is stored and does not signal `changed`. Without it, each change does.
        """
        self.collection = collection
        self.objects: ObjectMap[T] | None = None
        """The observed objects; None until the collection has been listed."""
        self.installed = True
        """Whether the API server serves this kind."""
        self.problem: ApiError | None = None
        """Why the collection cannot be watched; None if it can."""
        self._changed = changed
        self._also = also
        self._reads = reads

    @property
    def resource(self) -> Resource:
        """The collection of the stored objects."""
        return self.collection.resource

    @property
    def is_observed(self) -> bool:
        """Whether the collection has been listed."""
        return self.objects is not None

    @property
    def known(self) -> ObjectMap[T]:
        """The observed objects; empty until the collection has been listed."""
        return self.objects if self.objects is not None else ObjectMap()

    async def follow(self, client: Client, clock: Clock, random: Random, groups: ApiGroups) -> None:
        """List and watch the collection until cancelled."""
        reflector = Reflector(client, self.collection, clock, random, waits=WAITS, groups=groups)
        await reflector.run(self.observe, self.observe_error)

    def observe(self, delta: Delta[T]) -> None:
        """Store the objects that the reflector has observed."""
        if self._also is not None:
            self._also(delta)
        matters = self._matters(delta)
        self.objects = ObjectMap.of(delta.objects)
        self.installed = True
        if matters:
            self._changed.set()

    def _matters(self, delta: Delta[T]) -> bool:
        """Return whether a delta changes a field that is read; a delta that names no change may be any."""
        before, reads = self.objects, self._reads
        if reads is None or before is None or delta.removed or not delta.changed:
            return True
        for key in delta.changed:
            known, item = before.get(key), delta.objects.get(key)
            if known is None or item is None or reads(known) != reads(item):
                return True
        return False

    def observe_error(self, error: ApiError | None) -> None:
        """Store the reflector's error. A kind that is not installed counts as observed, with no objects.

        Each API server has the core kinds, which are in no group: a 404 for one of them comes from a proxy.
        """
        is_absent = isinstance(error, NotFoundError) and bool(self.resource.group)
        before, self.problem = self.problem, None if is_absent else error
        if self.problem is not None and type(before) is not type(self.problem):
            log.warning("%s; the controller retries the watch, and keeps the last observed objects", self.problem)
        if is_absent:
            self.installed = False
            self.objects = ObjectMap()
        self._changed.set()

    def take(self, item: T) -> None:
        """Store the object that a write returned, so that it is not written again before the watch delivers it.

        A newer object that the watch has already delivered stays, since the watch would not deliver it again.
        """
        if self.objects is None:
            return
        known = self.objects.get(key_of(item))
        if known is None or is_newer(item, known):
            self.objects = self.objects.with_object(key_of(item), item)

    def drop(self, key: ObjectKey) -> None:
        """Remove an object that was deleted."""
        if self.objects is not None:
            self.objects = self.objects.without(key)

    def get(self, name: str, namespace: str = "") -> T | None:
        """Return one object; None if it does not exist, or if the collection has not been listed."""
        return self.known.get(ObjectKey(namespace, name))

"""What is known of one collection: what its reflector says, and what was answered to writes since."""

import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Generic, Protocol, TypeVar

from gpuvirt.clock import Clock, Signal
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ApiError, NotFoundError
from gpuvirt.cluster.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.cluster.reflector import Reflector
from gpuvirt.cluster.resources import KubernetesObject, Resource, is_newer

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubernetesObject)

Objects = Mapping[ObjectKey, T]


class AnyStore(Protocol):
    """A store of objects of whatever shape."""

    @property
    def resource(self) -> Resource:
        """The collection whose objects it has."""
        ...

    @property
    def is_observed(self) -> bool:
        """Whether its objects are known."""
        ...

    @property
    def problem(self) -> ApiError | None:
        """Why nothing is heard."""
        ...

    def drop(self, key: ObjectKey) -> None:
        """Take that an object was deleted."""
        ...

    def tell(self, error: ApiError | None, /) -> None:
        """Take what is wrong."""
        ...

    async def follow(self, client: Client, clock: Clock, random: Random) -> None:
        """Follow the collection for ever."""
        ...


class Store(Generic[T]):
    """One collection's objects, for those who decide by them."""

    def __init__(
        self, collection: Collection[T], changed: Signal, also: Callable[[Delta[T]], None] | None = None
    ) -> None:
        """`also` is told the same news first."""
        self.collection = collection
        self.objects: ObjectMap[T] | None = None
        """None until they were heard."""
        self.installed = True
        """Whether the cluster has this kind of objects at all."""
        self.problem: ApiError | None = None
        """Why nothing is heard."""
        self._changed = changed
        self._also = also

    @property
    def resource(self) -> Resource:
        """The collection whose objects it has."""
        return self.collection.resource

    @property
    def is_observed(self) -> bool:
        """Whether its objects are known."""
        return self.objects is not None

    @property
    def known(self) -> ObjectMap[T]:
        """The objects; none before they were heard."""
        return self.objects if self.objects is not None else ObjectMap()

    async def follow(self, client: Client, clock: Clock, random: Random) -> None:
        """Follow the collection for ever."""
        await Reflector(client, self.collection, clock, random).run(self.observe, self.tell)

    def observe(self, delta: Delta[T]) -> None:
        """Take what the reflector says."""
        if self._also is not None:
            self._also(delta)
        self.objects = ObjectMap.of(delta.objects)
        self.installed = True
        self._changed.set()

    def tell(self, error: ApiError | None) -> None:
        """Take what is wrong; a kind that is not installed has no objects, and that is known."""
        before, self.problem = self.problem, None if isinstance(error, NotFoundError) else error
        if self.problem is not None and type(before) is not type(self.problem):
            log.warning("%s; it is tried again, and nothing is concluded meanwhile", self.problem)
        if isinstance(error, NotFoundError):
            self.installed = False
            self.objects = ObjectMap()
        self._changed.set()

    def take(self, item: T) -> None:
        """Take what a write has answered: the watch says it a moment later, and nothing is to be written twice.

        Where the watch was faster, and has said what came of it since, that stays: nobody would say it again.
        """
        if self.objects is None:
            return
        known = self.objects.get(key_of(item))
        if known is None or is_newer(item, known):
            self.objects = self.objects.with_object(key_of(item), item)

    def drop(self, key: ObjectKey) -> None:
        """Take that an object was deleted."""
        if self.objects is not None:
            self.objects = self.objects.without(key)

    def get(self, name: str, namespace: str = "") -> T | None:
        """Return one object, None where it is not there or nothing was heard."""
        return self.known.get(ObjectKey(namespace, name))

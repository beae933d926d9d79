"""What is known of one collection: what its reflector says, and what was answered to writes since."""

import logging
from collections.abc import Mapping
from typing import Generic, TypeVar

from gpuvirt.clock import Signal
from gpuvirt.cluster.client import Collection
from gpuvirt.cluster.failures import ApiError, NotFoundError
from gpuvirt.cluster.mirror import News
from gpuvirt.cluster.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.cluster.resources import KubernetesObject, is_newer

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubernetesObject)

Objects = Mapping[ObjectKey, T]


class Store(Generic[T]):
    """One collection's objects, for those who decide by them."""

    def __init__(self, collection: Collection[T], changed: Signal) -> None:
        self.collection = collection
        self.objects: ObjectMap[T] | None = None
        """None until they were heard."""
        self.installed = True
        """Whether the cluster has this kind of objects at all."""
        self.trouble: ApiError | None = None
        """Why nothing is heard."""
        self._changed = changed

    def hear(self, news: News[T]) -> None:
        """Take what the reflector says."""
        self.objects = ObjectMap.of(news.objects)
        self.installed = True
        self._changed.set()

    def tell(self, error: ApiError | None) -> None:
        """Take what is wrong; a kind that is not installed has no objects, and that is known."""
        before, self.trouble = self.trouble, None if isinstance(error, NotFoundError) else error
        if self.trouble is not None and type(before) is not type(self.trouble):
            log.warning("%s; it is tried again, and nothing is concluded meanwhile", self.trouble)
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
        return self.objects.get(ObjectKey(namespace, name)) if self.objects is not None else None

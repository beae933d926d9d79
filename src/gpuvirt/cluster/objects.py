"""Objects by their keys, as a mapping that never changes: a copy with one other object shares all but a part.

A watch tells one event at a time, and each leads to another state of the collection. With a `dict`, each would cost a
copy of all objects. Whoever has a mapping may keep it.
"""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar
from zlib import crc32

from typing_extensions import override

from gpuvirt.cluster.resources import KubernetesObject

T = TypeVar("T", bound=KubernetesObject)

PARTS = 128
"""A change copies one of the parts and the list of all: of 5,000 objects some 40, and 128 references."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """An object's place in its collection; the namespace is empty where there is none."""

    namespace: str
    name: str


def key_of(item: KubernetesObject) -> ObjectKey:
    """Return the place of an object."""
    return ObjectKey(item.metadata.namespace, item.metadata.name)


def _place(key: ObjectKey, parts: int) -> int:
    """Return the part that an object lies in: the same in each process, so that all go through objects in one order."""
    return crc32(f"{key.namespace}/{key.name}".encode()) % parts


class ObjectMap(Mapping[ObjectKey, T]):
    """Objects by their keys."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[dict[ObjectKey, T], ...] | None = None) -> None:
        empty: dict[ObjectKey, T] = {}
        self._parts = (empty,) * PARTS if parts is None else parts

    @classmethod
    def of(cls, objects: Mapping[ObjectKey, T], parts: int = PARTS) -> "ObjectMap[T]":
        """Return the same objects; a map of this kind is returned as it is."""
        if isinstance(objects, ObjectMap):
            return objects
        filled = tuple(dict[ObjectKey, T]() for _ in range(parts))
        for key, item in objects.items():
            filled[_place(key, parts)][key] = item
        return cls(filled)

    def with_object(self, key: ObjectKey, item: T) -> "ObjectMap[T]":
        """Return the objects with one more, or another one in its place."""
        at = _place(key, len(self._parts))
        return self._replaced(at, {**self._parts[at], key: item})

    def without(self, key: ObjectKey) -> "ObjectMap[T]":
        """Return the objects but for one, which need not be there."""
        at = _place(key, len(self._parts))
        return self._replaced(at, {other: item for other, item in self._parts[at].items() if other != key})

    def _replaced(self, at: int, part: dict[ObjectKey, T]) -> "ObjectMap[T]":
        return ObjectMap((*self._parts[:at], part, *self._parts[at + 1 :]))

    @override
    def __getitem__(self, key: ObjectKey) -> T:
        return self._parts[_place(key, len(self._parts))][key]

    @override
    def __iter__(self) -> Iterator[ObjectKey]:
        return chain.from_iterable(self._parts)

    @override
    def __len__(self) -> int:
        return sum(map(len, self._parts))

    # Without these two, each object would be looked up while all are gone through.

    @override
    def values(self) -> ValuesView[T]:
        return _Values(self, self._parts)

    @override
    def items(self) -> ItemsView[ObjectKey, T]:
        return _Items(self, self._parts)


class _Values(ValuesView[T]):
    def __init__(self, objects: ObjectMap[T], parts: tuple[dict[ObjectKey, T], ...]) -> None:
        super().__init__(objects)
        self._parts = parts

    @override
    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(part.values() for part in self._parts)


class _Items(ItemsView[ObjectKey, T]):
    def __init__(self, objects: ObjectMap[T], parts: tuple[dict[ObjectKey, T], ...]) -> None:
        super().__init__(objects)
        self._parts = parts

    @override
    def __iter__(self) -> Iterator[tuple[ObjectKey, T]]:
        return chain.from_iterable(part.items() for part in self._parts)

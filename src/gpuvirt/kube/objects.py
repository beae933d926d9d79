"""An immutable mapping of objects by their keys. A copy with one change shares all parts but one with the original.

Each event of a watch leads to a new state of the collection. With a `dict`, each event would cost a copy of all
objects. A consumer may keep any mapping that it got.
Refused: a library of persistent mappings, a C extension for 60 lines.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import TypeVar
from zlib import crc32

import msgspec
from typing_extensions import override

from gpuvirt.kube.resources import KubernetesObject

T = TypeVar("T", bound=KubernetesObject)

PARTS = 128
"""The number of parts. A change copies one part and the list of parts: of 5,000 objects some 40, and 128 references."""


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """The key of an object in its collection; the namespace is empty for cluster-scoped objects."""

    namespace: str
    name: str


def key_of(item: KubernetesObject) -> ObjectKey:
    """Return the key of an object."""
    return ObjectKey(item.metadata.namespace, item.metadata.name)


def _part_of(key: ObjectKey, parts: int) -> int:
    """Return the part of an object: the same in each process, so that all processes iterate in the same order."""
    return crc32(f"{key.namespace}/{key.name}".encode()) % parts


class ObjectMap(Mapping[ObjectKey, T]):
    """An immutable mapping of objects by their keys."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[dict[ObjectKey, T], ...] | None = None) -> None:
        empty: dict[ObjectKey, T] = {}
        self._parts = (empty,) * PARTS if parts is None else parts

    @classmethod
    def of(cls, objects: Mapping[ObjectKey, T], parts: int = PARTS) -> "ObjectMap[T]":
        """Return an ObjectMap of the objects; an ObjectMap is returned as it is."""
        if isinstance(objects, ObjectMap):
            return objects
        filled = tuple(dict[ObjectKey, T]() for _ in range(parts))
        for key, item in objects.items():
            filled[_part_of(key, parts)][key] = item
        return cls(filled)

    @property
    def parts(self) -> tuple[Mapping[ObjectKey, T], ...]:
        """The parts. One that is the same in two maps has the same objects; an object's part follows from its key."""
        return self._parts

    def with_object(self, key: ObjectKey, item: T) -> "ObjectMap[T]":
        """Return a copy with an object added or replaced."""
        at = _part_of(key, len(self._parts))
        return self._replaced(at, {**self._parts[at], key: item})

    def without(self, key: ObjectKey) -> "ObjectMap[T]":
        """Return a copy without an object; the object need not exist."""
        at = _part_of(key, len(self._parts))
        return self._replaced(at, {other: item for other, item in self._parts[at].items() if other != key})

    def with_changes(self, changed: Mapping[ObjectKey, T], removed: Iterable[ObjectKey]) -> "ObjectMap[T]":
        """Return a copy with objects added or replaced, and others removed, which must exist."""
        parts = list(self._parts)

        def part_of(key: ObjectKey) -> dict[ObjectKey, T]:
            at = _part_of(key, len(parts))
            if parts[at] is self._parts[at]:
                parts[at] = dict(parts[at])
            return parts[at]

        for key, item in changed.items():
            part_of(key)[key] = item
        for key in removed:
            del part_of(key)[key]
        return ObjectMap(tuple(parts))

    def _replaced(self, at: int, part: dict[ObjectKey, T]) -> "ObjectMap[T]":
        return ObjectMap((*self._parts[:at], part, *self._parts[at + 1 :]))

    @override
    def __getitem__(self, key: ObjectKey) -> T:
        return self._parts[_part_of(key, len(self._parts))][key]

    @override
    def __iter__(self) -> Iterator[ObjectKey]:
        return chain.from_iterable(self._parts)

    @override
    def __len__(self) -> int:
        return sum(map(len, self._parts))

    # Mapping's own views would look up each object by its key.

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

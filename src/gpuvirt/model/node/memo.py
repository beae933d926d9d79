"""Values with the inputs that they follow from. The next decisions take over a value whose inputs are the same."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import msgspec

V = TypeVar("V")


class CacheKey(msgspec.Struct, frozen=True):
    """The inputs of a value."""

    same: tuple[object, ...]
    """Frozen inputs that are compared by identity: equal ones take longer to compare than to decide, or may differ in a
    field that `==` leaves out."""
    equal: tuple[object, ...] = ()
    """Inputs that are compared by value."""

    def same_as(self, other: Self, /) -> bool:
        """Return whether the same value follows from both."""
        return all(now is last for now, last in zip(self.same, other.same, strict=True)) and self.equal == other.equal


class Memoized(msgspec.Struct, Generic[V], frozen=True):
    """A value, and the inputs that it follows from."""

    key: CacheKey
    value: V


def memoized(last: Memoized[V] | None, key: CacheKey, decide: Callable[[], V]) -> Memoized[V]:
    """Return the last value if the same follows from these inputs, else the one that is decided now."""
    return last if last is not None and key.same_as(last.key) else Memoized(key, decide())

"""The latest observed state of one object that is watched and written at the same time.

Watch events and the answers to writes come by different connections. So an answer may arrive after the watch has
reported the write, and even later changes. The later version of both counts, since the watch does not repeat it.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from gpuvirt.cluster.resources import KubernetesObject, is_newer

T = TypeVar("T", bound=KubernetesObject)


@dataclass(frozen=True, slots=True, eq=False)
class Word(Generic[T]):
    """One observation of the object. Each is distinct (compared by identity), even if two have the same content."""

    item: T | None
    """None if the object does not exist."""


class Known(Generic[T]):
    """The latest observed state of one object."""

    def __init__(self) -> None:
        self.word: Word[T] | None = None
        """The latest observation; None before the first."""

    @property
    def item(self) -> T | None:
        """The object; None if it does not exist or has not been observed."""
        return self.word.item if self.word is not None else None

    def observe(self, item: T | None) -> None:
        """Store an observation of the watch."""
        self.word = Word(item)

    def answer(self, before: Word[T] | None, item: T) -> None:
        """Store the answer to a write that began after the observation `before`, unless a later version is known."""
        now = self.word
        if now is before or (now is not None and now.item is not None and is_newer(item, now.item)):
            self.word = Word(item)

    def doubt(self, before: Word[T] | None) -> None:
        """Forget the observation `before` after a conflicting write; the watch reports the actual state, or has."""
        if self.word is before:
            self.word = None

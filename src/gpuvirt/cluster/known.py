"""What is known of one object that is watched and written at once: the later of what the watch and the answers say.

The two come by different connections, so an answer may arrive after the watch has said what came of it, and what came
after that; nobody says it again.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from gpuvirt.cluster.resources import KubernetesObject, is_newer

T = TypeVar("T", bound=KubernetesObject)


@dataclass(frozen=True, slots=True, eq=False)
class Word(Generic[T]):
    """What was said last, and at which time: two that say the same are two."""

    item: T | None
    """None: there is none."""


class Known(Generic[T]):
    """One object."""

    def __init__(self) -> None:
        self.word: Word[T] | None = None
        """None until something was heard."""

    @property
    def item(self) -> T | None:
        """The object; None where there is none, or nothing was heard."""
        return self.word.item if self.word is not None else None

    def observe(self, item: T | None) -> None:
        """Take what the watch says."""
        self.word = Word(item)

    def answer(self, before: Word[T] | None, item: T) -> None:
        """Take what a write was answered that began when `before` was known."""
        now = self.word
        if now is before or (now is not None and now.item is not None and is_newer(item, now.item)):
            self.word = Word(item)

    def doubt(self, before: Word[T] | None) -> None:
        """Take that a write which began when `before` was known found something else: the watch says what, or has."""
        if self.word is before:
            self.word = None

"""What every code of a reason or finding has: its word, its meaning, its level, and whether it passes by itself."""

from enum import StrEnum
from typing import Self


class Level(StrEnum):
    """How grave a finding is, from the least to the gravest."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It could not be told: not the same as absent, and not the same as well."""
    WARNING = "warning"
    ERROR = "error"
    """Something that this host is set up to do can't work."""


class Topic(StrEnum):
    """The parts of the catalogue, as docs/reference.md has them."""

    NOT_OFFERED = "not offered"
    UNHEALTHY = "unhealthy"
    ALLOCATE = "allocate"
    CHANGE = "change"
    VGPU = "vgpu"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    CONTROLLER = "controller"
    KUBEVIRT = "kubevirt"
    HOST = "host"
    WORKLOAD = "workload"


def entry(
    topic: Topic, word: str, meaning: str, level: Level = Level.WARNING, *, passes: bool = False
) -> tuple[str, Topic, str, Level, bool]:
    """Return what the catalogue says of one code."""
    return word, topic, meaning, level, passes


class Code(StrEnum):
    """A code: the same word in the command line, Kubernetes objects, metrics and the log."""

    topic: Topic
    meaning: str
    """The line of the documentation."""
    level: Level
    """How grave `gpuvirt doctor` and `gpuvirt why` call it."""
    passes: bool
    """Whether a change that waits for it is pending: it passes when a user, a pod or another change ends."""

    def __new__(cls, word: str, topic: Topic, meaning: str, level: Level, passes: bool) -> Self:
        """Make a member of the entry in the catalogue."""
        code = str.__new__(cls, word)
        code._value_ = word
        code.topic, code.meaning, code.level, code.passes = topic, meaning, level, passes
        return code

    @classmethod
    def named(cls, word: str) -> Self | None:
        """Return the code of a word, None where the catalogue has none."""
        return next((code for code in cls if code == word), None)

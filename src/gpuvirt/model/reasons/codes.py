"""The base of all codes: each has a word, a meaning, a level, and whether it passes by itself."""

from enum import StrEnum
from typing import Self


class Level(StrEnum):
    """The severity of a finding, the lowest first."""

    OK = "ok"
    UNKNOWN = "unknown"
    """The state could not be observed. It counts neither as absent nor as good."""
    WARNING = "warning"
    ERROR = "error"
    """A function that this host is set up for can't work."""


class Topic(StrEnum):
    """The parts of the catalogue, which are the tables of docs/reference/reasons.md and findings.md."""

    NOT_OFFERED = "not offered"
    UNHEALTHY = "unhealthy"
    ALLOCATE = "allocate"
    CHANGE = "change"
    VGPU = "vgpu"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    ADMISSION = "admission"
    CONTROLLER = "controller"
    HYPERVISOR = "hypervisor"
    KUBEVIRT = "kubevirt"
    SCHEDULE = "schedule"
    HOST = "host"
    WORKLOAD = "workload"


def entry(
    topic: Topic, word: str, meaning: str, level: Level = Level.WARNING, *, passes: bool = False
) -> tuple[str, Topic, str, Level, bool]:
    """Return the catalogue's entry of one code."""
    return word, topic, meaning, level, passes


class Code(StrEnum):
    """A code: the same word in the command line, Kubernetes objects, metrics and the log."""

    topic: Topic
    meaning: str
    """The text of docs/reference."""
    level: Level
    """The level in `gpuvirt doctor` and `gpuvirt why`."""
    passes: bool
    """Whether the cause passes by itself, when a user, a pod or another change ends. A change then stays pending."""

    def __new__(cls, word: str, topic: Topic, meaning: str, level: Level, passes: bool) -> Self:
        """Make a member from an entry of the catalogue."""
        code = str.__new__(cls, word)
        code._value_ = word
        code.topic, code.meaning, code.level, code.passes = topic, meaning, level, passes
        return code

    @classmethod
    def named(cls, word: str) -> Self | None:
        """Return the code of a word, None if the catalogue does not have it."""
        found = cls._value2member_map_.get(word)
        return found if isinstance(found, cls) else None

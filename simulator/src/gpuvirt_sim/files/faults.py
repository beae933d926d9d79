"""Faults of a simulated host: paths that fail, that refuse writes, that read as something else, or that act."""

from collections.abc import Callable

import msgspec

from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import fails


class Faults(msgspec.Struct):
    """The faults, by the path that the caller uses to read, list, follow or write."""

    errors: dict[HostPath, int] = msgspec.field(default_factory=dict)
    contents: dict[HostPath, bytes] = msgspec.field(default_factory=dict)
    acts: dict[HostPath, Callable[[], None]] = msgspec.field(default_factory=dict)
    refusals: dict[HostPath, int] = msgspec.field(default_factory=dict)
    asleep: set[HostPath] = msgspec.field(default_factory=set)
    """Files whose writers sleep until the path is removed from this set."""

    def fail(self, path: HostPath, number: int) -> None:
        """Make reads of `path` fail with an errno."""
        self.errors[path] = number

    def refuse(self, path: HostPath, number: int) -> None:
        """Make writes to `path` fail with an errno, without effect."""
        self.refusals[path] = number

    def answer(self, path: HostPath, content: bytes) -> None:
        """Make `path` read as `content`."""
        self.contents[path] = content

    def before_read(self, path: HostPath, act: Callable[[], None]) -> None:
        """Call `act` once, just before `path` is next read."""
        self.acts[path] = act

    def heal(self) -> None:
        """Remove all faults."""
        self.errors.clear()
        self.contents.clear()
        self.acts.clear()
        self.refusals.clear()
        self.asleep.clear()

    def apply_to_write(self, path: HostPath) -> None:
        """Raise OSError where writes to `path` are refused."""
        if number := self.refusals.get(path):
            raise fails(number, path)

    def apply(self, path: HostPath) -> bytes | None:
        """Call the callback of `path`, raise the path's error, or return the replaced content; None without a fault."""
        if act := self.acts.pop(path, None):
            act()
        if number := self.errors.get(path):
            raise fails(number, path)
        return self.contents.get(path)

"""What goes wrong on a simulated host: attributes that fail or refuse, that read as something else, or that act."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuvirt.paths import HostPath
from gpuvirt.sim.tree import fails


@dataclass(slots=True)
class Faults:
    """Faults by the path that is read, listed, followed or written, as whoever does it has it."""

    errors: dict[HostPath, int] = field(default_factory=dict)
    contents: dict[HostPath, bytes] = field(default_factory=dict)
    acts: dict[HostPath, Callable[[], None]] = field(default_factory=dict)
    refusals: dict[HostPath, int] = field(default_factory=dict)
    asleep: set[HostPath] = field(default_factory=set)
    """Files whose writers sleep until the path is taken out."""

    def fail(self, path: HostPath, number: int) -> None:
        """Let `path` fail with an errno."""
        self.errors[path] = number

    def refuse(self, path: HostPath, number: int) -> None:
        """Let writes to `path` fail with an errno, and do nothing."""
        self.refusals[path] = number

    def answer(self, path: HostPath, content: bytes) -> None:
        """Let `path` read as `content`."""
        self.contents[path] = content

    def before_read(self, path: HostPath, act: Callable[[], None]) -> None:
        """Do something once, just before `path` is next looked at."""
        self.acts[path] = act

    def heal(self) -> None:
        """Take all faults away."""
        self.errors.clear()
        self.contents.clear()
        self.acts.clear()
        self.refusals.clear()
        self.asleep.clear()

    def apply_to_write(self, path: HostPath) -> None:
        """Fail where writes are refused."""
        if number := self.refusals.get(path):
            raise fails(number, path)

    def apply(self, path: HostPath) -> bytes | None:
        """Act, fail, or return what `path` reads as instead; None when nothing is wrong with it."""
        if act := self.acts.pop(path, None):
            act()
        if number := self.errors.get(path):
            raise fails(number, path)
        return self.contents.get(path)

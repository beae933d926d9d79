"""What was met at one place of a host: a file, a folder, a link, or nothing; and a GPU or screen as files show it."""

from dataclasses import dataclass

from gpuvirt.facts.pci import Unread
from gpuvirt.paths import HostPath

MOST_SHOWN = 100
"""Characters of a value that somebody is shown."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One file, and what it held: its text, None where there is none, Unread where that could not be told."""

    path: HostPath
    value: str | Unread | None = None

    @property
    def text(self) -> str | None:
        """What it held, None where it held nothing that we know."""
        return self.value if isinstance(self.value, str) else None

    @property
    def shown(self) -> str:
        """What was met, on one line."""
        if self.value is None:
            return "not there"
        return self.value.said if isinstance(self.value, Unread) else legible(self.value) or "empty"


@dataclass(frozen=True, slots=True)
class Listing:
    """One folder or list, and the names in it."""

    path: HostPath
    names: tuple[str, ...] | Unread | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """The names that were seen."""
        return self.names if isinstance(self.names, tuple) else ()

    @property
    def shown(self) -> str:
        """What was met, on one line."""
        if self.names is None:
            return "not there"
        return self.names.said if isinstance(self.names, Unread) else legible(" ".join(self.names)) or "empty"


@dataclass(frozen=True, slots=True)
class Link:
    """One symbolic link, and the last part of what it says."""

    path: HostPath
    target: str | Unread | None = None

    @property
    def shown(self) -> str:
        """What was met."""
        return Attribute(self.path, self.target).shown


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether something is there."""

    path: HostPath
    there: bool | Unread = False

    @property
    def shown(self) -> str:
        """What was met."""
        return self.there.said if isinstance(self.there, Unread) else "there" if self.there else "not there"


def legible(text: str) -> str:
    """Return a text on one line, printable, and not without end."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class FunctionSetup:
    """What firmware and kernel have made of one GPU."""

    resource: Attribute
    """Its BARs: a line each of start, end and flags."""
    boot_vga: Attribute
    reset_method: Attribute | None
    """None where it was not asked: a function without a driver may be waiting to be unbound."""
    reset: Presence
    """`reset` is there where the kernel knows a way; older kernels (before 5.15) have no list of ways."""


@dataclass(frozen=True, slots=True)
class Framebuffer:
    """A screen of the kernel's, and the function that shows it."""

    name: Attribute
    device: Link
    """To an address, `simple-framebuffer.0`, `efi-framebuffer.0`."""

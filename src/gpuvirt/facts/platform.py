"""The content of one file, folder or link of a host, and GPUs and framebuffers as such files show them."""

import msgspec

from gpuvirt import plain
from gpuvirt.facts.pci import Unread
from gpuvirt.paths import HostPath

MOST_SHOWN = 100
"""The most characters of a value that messages show."""


class Attribute(msgspec.Struct, frozen=True):
    """One file and its text: None if it does not exist, Unread if it could not be read."""

    path: HostPath
    value: str | Unread | None = None

    @property
    def text(self) -> str | None:
        """The text, None if the file does not exist or could not be read."""
        return self.value if isinstance(self.value, str) else None

    @property
    def shown(self) -> str:
        """The content on one line."""
        if self.value is None:
            return "not there"
        return self.value.detail if isinstance(self.value, Unread) else legible(self.value) or "empty"


class Listing(msgspec.Struct, frozen=True):
    """One folder or list, and the names in it."""

    path: HostPath
    names: tuple[str, ...] | Unread | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """The names; none if they could not be read."""
        return self.names if isinstance(self.names, tuple) else ()

    @property
    def shown(self) -> str:
        """The names on one line."""
        if self.names is None:
            return "not there"
        return self.names.detail if isinstance(self.names, Unread) else legible(" ".join(self.names)) or "empty"


class SymbolicLink(msgspec.Struct, frozen=True):
    """One symbolic link, and the last part of its target."""

    path: HostPath
    target: str | Unread | None = None

    @property
    def shown(self) -> str:
        """The target on one line."""
        return Attribute(self.path, self.target).shown


class Presence(msgspec.Struct, frozen=True):
    """Whether a file exists."""

    path: HostPath
    exists: bool | Unread = False

    @property
    def shown(self) -> str:
        """The answer as text."""
        return self.exists.detail if isinstance(self.exists, Unread) else "there" if self.exists else "not there"


def legible(text: str) -> str:
    """Return a text on one line, with printable characters only, and not longer than MOST_SHOWN."""
    return plain.one_line("".join(character if character.isprintable() else " " for character in text), MOST_SHOWN)


class FunctionSetup(msgspec.Struct, frozen=True):
    """One GPU as firmware and kernel have set it up."""

    resource: Attribute
    """The GPU's BARs: a line each with start, end and flags."""
    boot_vga: Attribute
    reset_method: Attribute | None
    """None if it was not read, since an unbind of a function without a driver may still be under way."""
    reset: Presence
    """`reset` exists if the kernel has a reset method. Kernels before 5.15 do not list the methods."""


class Framebuffer(msgspec.Struct, frozen=True):
    """A framebuffer of the kernel, and its device."""

    name: Attribute
    device: SymbolicLink
    """A link to a PCI address, `simple-framebuffer.0` or `efi-framebuffer.0`."""

"""The error tree: one base, and one class for each failure that somebody catches.

A message says what failed, where, what was expected, what was found, and how to mend it. Classes that carry a value of
a higher layer (a refused allocation carries its reason) are declared beside that value and inherit from here.
"""


class GpuvirtError(Exception):
    """Base of all errors that gpuvirt raises on purpose; its text is fit for a person."""


class ConfigError(GpuvirtError):
    """A document that a person wrote can't be used; the command line exits with 2.

    `where` is the file with the line when it is known (`node.yaml:7`), `path` the place inside it (`$.offer[0]`); or
    `where` is an option (`--listen`), which has nothing inside it.
    """

    def __init__(self, message: str, *, where: str, path: str = "$") -> None:
        place = where if where.startswith("--") else f"{where}: {path}"
        super().__init__(f"{place}: {message}")
        self.where = where
        self.path = path
        self.message = message


class DamagedError(GpuvirtError):
    """Content that a program wrote is not what it wrote, or is of another program."""


class InvalidIdError(GpuvirtError, ValueError):
    """A text is not the address, id or name that it should be."""

    def __init__(self, kind: str, text: str, expected: str) -> None:
        super().__init__(f"{text!r} is not {kind}: expected {expected}")


class PathTooLongError(GpuvirtError):
    """A unix socket path is longer than the kernel takes (107 bytes)."""


class DeviceBusyError(GpuvirtError):
    """A VFIO group, or a device of it, is open in another process; nothing may be done to its devices."""


class LeaseUnavailableError(GpuvirtError):
    """Whether VFIO devices are in use can't be told here (no node, no permission): not a proof of anything."""


class VgpuUnavailableError(GpuvirtError):
    """The host has not what was to be made or removed: it has changed since it was looked at. Nothing was written."""


class VfsUnchangedError(GpuvirtError):
    """A GPU has not the VFs that it should have, though whatever was to switch them said nothing of a failure."""


class MountError(GpuvirtError):
    """A simulated machine can't be mounted."""


class AlreadyRunningError(GpuvirtError):
    """Another agent serves this node."""

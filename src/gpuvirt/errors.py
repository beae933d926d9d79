"""The error tree: one base class, and one class for each failure that callers catch.

A message names the failure and its place, the expected and the found value, and the fix. A class with a value of a
higher layer (a refused allocation has its reason) is declared beside that value and inherits from a class here.
"""


class GpuvirtError(Exception):
    """The base class of all errors that gpuvirt raises on purpose; users see its text."""


class ConfigError(GpuvirtError):
    """A document of a user is invalid; the command line exits with 2.

    `where` is the file, with the line where it is known (`node.yaml:7`), and `path` the place in it (`$.offer[0]`). Or
    `where` is an option (`--listen`) or a command (`why`), and `path` is not used.
    """

    def __init__(self, message: str, *, where: str, path: str = "") -> None:
        place = f"{where}: {path}" if path and not where.startswith("--") else where
        super().__init__(f"{place}: {message}")
        self.where = where
        self.path = path
        self.message = message


class DamagedError(GpuvirtError):
    """The content of a file that gpuvirt or another program wrote is damaged, or of another program."""


class InvalidIdError(GpuvirtError, ValueError):
    """A text is not a valid address, id or name."""

    def __init__(self, kind: str, text: str, expected: str) -> None:
        super().__init__(f"{text!r} is not {kind}: expected {expected}")


class PathTooLongError(GpuvirtError):
    """The path of a unix socket is longer than the kernel allows (107 bytes)."""


class DeviceBusyError(GpuvirtError):
    """Another process has a VFIO group or one of its devices open, so gpuvirt must not change the devices."""


class LeaseUnavailableError(GpuvirtError):
    """It is unknown whether VFIO devices are in use (no node, no permission)."""


class VgpuUnavailableError(GpuvirtError):
    """The host no longer supports a vGPU, or no longer has it: it has changed since the scan. Nothing was written."""


class VfsUnchangedError(GpuvirtError):
    """A GPU does not have the desired VFs, although the switch reported no error."""


class AlreadyRunningError(GpuvirtError):
    """Another agent runs on this node."""

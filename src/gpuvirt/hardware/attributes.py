"""One attribute of sysfs, read: its value, None where there is none, Unread where it could not be told."""

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.paths import HostPath

T = TypeVar("T")

_DECIMAL = re.compile(r"-?[0-9]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")

ABSENT = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""What the kernel answers for a thing that is not there, or that goes away while it is read."""


def text(kernel: Kernel, path: HostPath, *, limit: int = ATTRIBUTE_BYTES) -> str | Unread | None:
    """Return an attribute's text without the white space around it."""
    try:
        content = kernel.read(path, limit=limit)
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Unread(path, seen=repr(content[:32]))


def parsed(kernel: Kernel, path: HostPath, parse: Callable[[str], T]) -> T | Unread | None:
    """Return an attribute's value; a text that `parse` refuses with ValueError or a GpuvirtError is Unread."""
    content = text(kernel, path)
    if content is None or isinstance(content, Unread):
        return content
    return understood(path, content, parse)


def understood(path: HostPath, content: str, parse: Callable[[str], T]) -> T | Unread:
    """Return what `parse` makes of `content`, Unread where it refuses."""
    try:
        return parse(content)
    except ValueError:
        return Unread(path, seen=content[:64])


def number(content: str) -> int:
    """Parse a decimal number as sysfs writes it."""
    if not _DECIMAL.fullmatch(content):
        raise ValueError(content)
    return int(content)


def hexadecimal(content: str) -> int:
    """Parse a hexadecimal number with its `0x`, as the ids of a PCI function are written."""
    if not _HEXADECIMAL.fullmatch(content):
        raise ValueError(content)
    return int(content, 16)


def link_name(kernel: Kernel, path: HostPath) -> str | Unread | None:
    """Return the last component of what a link points to: a driver's name, a group's number."""
    try:
        target = kernel.readlink(path)
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)
    return target.rpartition("/")[2]


def names(kernel: Kernel, path: HostPath) -> list[str] | Unread | None:
    """Return the names in a folder, sorted."""
    try:
        return sorted(kernel.listdir(path))
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)

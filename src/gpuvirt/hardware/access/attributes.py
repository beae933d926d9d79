"""Reads one sysfs attribute: its value, None where the file does not exist, Unread where it could not be read."""

import errno
import os
import re
from collections.abc import Callable
from typing import TypeVar

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.paths import HostPath

T = TypeVar("T")

_DECIMAL = re.compile(r"-?[0-9]{1,18}")

_DEVICE_NUMBER = re.compile(r"([0-9]{1,8}):([0-9]{1,8})")

_MOST_NUMA_NODES = 1 << 10
"""MAX_NUMNODES where NODES_SHIFT is largest (arch/x86/Kconfig)."""

FILE_BYTES = 4 << 20
"""The limit for files that programs or people write: modules.dep of a distribution's kernel has 0.7 MiB."""

ABSENT = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""The errors of the kernel for a file that does not exist, or that disappears while it is read."""


def text(kernel: Kernel, path: HostPath, *, limit: int = ATTRIBUTE_BYTES) -> str | Unread | None:
    """Return an attribute's text without leading and trailing white space."""
    try:
        content = kernel.read(path, limit=limit)
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Unread(path, seen=repr(content[:32]))


def parsed(kernel: Kernel, path: HostPath, parse: Callable[[str], T]) -> T | Unread | None:
    """Return an attribute's value, Unread where `parse` raises ValueError."""
    content = text(kernel, path)
    if content is None or isinstance(content, Unread):
        return content
    return understood(path, content, parse)


def understood(path: HostPath, content: str, parse: Callable[[str], T]) -> T | Unread:
    """Return the parsed `content`, Unread where `parse` raises ValueError."""
    try:
        return parse(content)
    except ValueError:
        return Unread(path, seen=content[:64])


def number(content: str) -> int:
    """Parse a decimal number as sysfs writes it, of at most 18 digits."""
    if not _DECIMAL.fullmatch(content):
        raise ValueError(content)
    return int(content)


def numa_node(content: str) -> int:
    """Parse the number of a NUMA node; -1 stands for none."""
    node = number(content)
    if not -1 <= node < _MOST_NUMA_NODES:
        raise ValueError(content)
    return node


def pci_id(content: str) -> int:
    """Parse the id of a vendor or a device: 16 bits."""
    return _hexadecimal(content, digits=4)


def pci_class(content: str) -> int:
    """Parse a class code: 24 bits."""
    return _hexadecimal(content, digits=6)


def pci_revision(content: str) -> int:
    """Parse a revision: 8 bits."""
    return _hexadecimal(content, digits=2)


def _hexadecimal(content: str, *, digits: int) -> int:
    # A regular expression would take twice as long, and each scan parses several such values for each device. `int`
    # alone accepts `0x_1` and the digits of other scripts, which `isalnum` and `isascii` exclude.
    if content[:2] != "0x" or len(content) > len("0x") + digits or not (content.isascii() and content.isalnum()):
        raise ValueError(content)
    return int(content, 16)


def device_number(kernel: Kernel, path: HostPath) -> int | Unread | None:
    """Return the number of a device node, as `stat` reports it, from the device's attribute `dev` (`511:12`)."""
    return parsed(kernel, path, _device_number)


def _device_number(content: str) -> int:
    if (match := _DEVICE_NUMBER.fullmatch(content)) is None:
        raise ValueError(content)
    return os.makedev(int(match[1]), int(match[2]))


def link_name(kernel: Kernel, path: HostPath) -> str | Unread | None:
    """Return the last component of a link's target: the name of a driver, the number of an IOMMU group."""
    try:
        target = kernel.readlink(path)
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)
    return legible(target.rpartition("/")[2])


def names(kernel: Kernel, path: HostPath) -> list[str] | Unread | None:
    """Return the names in a folder, sorted."""
    try:
        return sorted(map(legible, kernel.listdir(path)))
    except OSError as error:
        return None if error.errno in ABSENT else Unread(path, errno=error.errno)


def names_or_raise(kernel: Kernel, path: HostPath) -> list[str]:
    """Return the sorted names in a folder, none where it does not exist; raise OSError where it cannot be read."""
    try:
        return sorted(map(legible, kernel.listdir(path)))
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise


def read_attribute(kernel: Kernel, path: str, *, limit: int = ATTRIBUTE_BYTES) -> Attribute:
    """Return the path and the text of a file."""
    where = HostPath(path)
    return Attribute(where, text(kernel, where, limit=limit))


def read_listing(kernel: Kernel, path: str) -> Listing:
    """Return the path of a folder and the names in it."""
    where = HostPath(path)
    found = names(kernel, where)
    return Listing(where, tuple(found) if isinstance(found, list) else found)


def legible(name: str) -> str:
    """Return a name with unprintable characters escaped: bytes that are not UTF-8 as `\\xff`, controls as `\\x1b`.

    The kernel's own names contain no such characters. A name that cannot be encoded would make `node.json` and the
    tables fail.
    """
    return name if name.isprintable() else "".join(map(_escaped, name))


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # Python's form of a byte that is not UTF-8 (PEP 383)
        return f"\\x{ord(character) & 0xFF:02x}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()

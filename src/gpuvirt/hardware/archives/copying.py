"""Copies files of a host: collects the copied files by their paths on the host, and those that could not be read."""

import errno
import re
from collections.abc import Iterable
from posixpath import basename, dirname

import msgspec

from gpuvirt.archive import Entry, Folder, Symlink
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.paths import HostPath

TEXT_BYTES = 1 << 20

_SAFE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.:@+]{0,127}")
"""Names in sysfs that are safe as file names of an archive; others are reported."""


def is_safe(name: str) -> bool:
    """Return whether a name is safe as the name of a file in an archive."""
    return bool(_SAFE.fullmatch(name))


class Copying(msgspec.Struct):
    """A copy in progress. A file that is read through a link is stored under the link's target, as on the host."""

    kernel: Kernel
    members: dict[HostPath, Entry] = msgspec.field(default_factory=dict)
    unread: list[Unread] = msgspec.field(default_factory=list)

    def names(self, path: HostPath, place: HostPath | None = None) -> list[str]:
        """Return the safe names in a folder, none where it does not exist; `place` is the folder's path in the copy."""
        found = attributes.names(self.kernel, path)
        if isinstance(found, Unread):
            self.unread.append(found)
        if found is None or isinstance(found, Unread):
            return []
        if place is not None:
            self.members.setdefault(place, Folder())
        unsafe = [name for name in found if not is_safe(name)]
        self.unread += (Unread(HostPath(f"{path}/{name}"), seen="a name that no device has") for name in unsafe)
        return [name for name in found if name not in unsafe]

    def files(self, here: HostPath, place: HostPath, names: Iterable[str]) -> None:
        """Copy files of the folder `here`, whose path in the copy is `place`."""
        for name in names:
            self.file(HostPath(f"{here}/{name}"), HostPath(dirname(f"{place}/{name}")))

    def file(self, path: HostPath, place: HostPath, limit: int = ATTRIBUTE_BYTES) -> None:
        """Copy an existing file into the folder `place`."""
        try:
            self.members[HostPath(f"{place}/{basename(path)}")] = self.kernel.read(path, limit=limit)
        except OSError as error:
            self.unread.append(Unread(path, errno=error.errno))

    def text(self, path: HostPath) -> None:
        """Copy a file that may be absent."""
        try:
            self.members[path] = self.kernel.read(path, limit=TEXT_BYTES)
        except OSError as error:
            if error.errno not in attributes.ABSENT:
                self.unread.append(Unread(path, errno=error.errno))

    def link(self, path: HostPath, place: HostPath | None = None) -> str | None:
        """Copy a link and return its target, None where it could not be copied."""
        try:
            target = self.kernel.readlink(path)
        except OSError as error:
            self.unread.append(Unread(path, errno=error.errno))
            return None
        inside = HostPath(f"{place}/{basename(path)}") if place is not None else path
        if target.startswith("/") or not target.isprintable() or not joined(HostPath(dirname(inside)), target):
            self.unread.append(Unread(path, seen=f"a link to {target[:60]}, out of /sys"))
            return None
        self.members[inside] = Symlink(target)
        return target

    def entry(self, path: HostPath) -> HostPath:
        """Copy a device's link in a bus or class, and return the folder of the device itself."""
        try:
            self.kernel.readlink(path)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the entry is the folder itself, not a link
                return path
        target = self.link(path)
        return joined(HostPath(dirname(path)), target) if target else path


def joined(folder: HostPath, target: str) -> HostPath:
    """Return the path to which a relative link in `folder` leads; an empty path where it leaves the root."""
    parts = [part for part in folder.split("/") if part]
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return HostPath("")
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    return HostPath("/" + "/".join(parts))

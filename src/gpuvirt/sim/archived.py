"""A host that was packed into a support archive, as a kernel that can be looked at and does nothing."""

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from gpuvirt.archive import Entry, Folder, Opened, Symlink
from gpuvirt.errors import DamagedError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.kernel import ATTRIBUTE_BYTES, OpenFile
from gpuvirt.paths import HostPath
from gpuvirt.sim.tree import File, Link, Node, Tree, fails


class ArchivedKernel:
    """A host's files as they were; what could not be read then fails as it did."""

    def __init__(self, opened: Opened) -> None:
        self.tree = _tree(opened.host)
        self._errors: Mapping[str, int] = {one.path: one.errno for one in opened.manifest.unread if one.errno}
        self._unread_in: defaultdict[str, set[str]] = defaultdict(set)
        for path in self._errors:
            folder, _, name = path.rpartition("/")
            self._unread_in[folder].add(name)

    @property
    def pids(self) -> frozenset[int]:
        """No process: nothing is done here, and no process of the host is archived."""
        return frozenset()

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first bytes of a file."""
        node = self._find(path)
        if not isinstance(node, File) or node.read is None:
            raise fails(errno.EISDIR, path)
        content = node.read()
        return (content.encode() if isinstance(content, str) else content)[:limit]

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Fail: nothing can be done to a host that is not here."""
        raise fails(errno.EROFS, f"{path} ({len(data)} bytes)")

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder."""
        self._fail_as_then(path)
        return [*{*self.tree.folder(path).entries, *self._unread_in.get(path, ())}]

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        node = self._find(path, follow=False)
        if not isinstance(node, Link):
            raise fails(errno.EINVAL, path)
        return node.target

    def device_number(self, path: HostPath, /) -> int:
        """Return 0 for what is there: nodes are archived as empty files."""
        self._find(path)
        return 0

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        """Fail: whether anybody used a group is not archived."""
        raise LeaseUnavailableError(f"group {group} is one of a host in an archive")

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        """Fail: whether anybody used a device is not archived."""
        raise LeaseUnavailableError(f"{', '.join(names)} are devices of a host in an archive")

    def open_files(self) -> Iterator[OpenFile]:
        """Fail: the processes of the host are not archived."""
        raise fails(errno.ENOENT, "/proc")

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Never call `wake`."""
        del wake
        return lambda: None

    def _find(self, path: HostPath, *, follow: bool = True) -> Node:
        self._fail_as_then(path)
        return self.tree.find(path, follow=follow)

    def _fail_as_then(self, path: HostPath) -> None:
        if number := self._errors.get(path):
            raise fails(number, path)


def _tree(members: Mapping[str, Entry]) -> Tree:
    tree = Tree()
    for path, entry in members.items():
        place = HostPath(f"/{path}")
        try:
            existing = tree.find(place, follow=False) if tree.exists(place) else None
            if isinstance(entry, Folder):
                tree.make(place)
            elif existing is not None:
                raise DamagedError(f"has two members at {path!a}")
            else:
                tree.place(place, Link(entry.target) if isinstance(entry, Symlink) else _file(entry))
        except OSError as error:
            raise DamagedError(f"has a member below one that is no folder: {path!a}") from error
    tree.make(HostPath("/sys"))
    return tree


def _file(content: bytes) -> File:
    return File(read=lambda: content)

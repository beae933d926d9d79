"""A host in a support archive, as a `Kernel` that answers reads and refuses everything else."""

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from gpuvirt.archive import Entry, Folder, Symlink
from gpuvirt.errors import DamagedError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.unpacking import Opened
from gpuvirt_sim.files.tree import File, Link, Node, Tree, fails


class ArchivedKernel:
    """The archived files. A read that failed on the host fails again, with the same errno."""

    def __init__(self, opened: Opened) -> None:
        self.tree = _tree(opened.host)
        self._errors: Mapping[str, int] = {file.path: file.errno for file in opened.manifest.unread if file.errno}
        self._unread_in: defaultdict[str, set[str]] = defaultdict(set)
        for path in self._errors:
            folder, _, name = path.rpartition("/")
            self._unread_in[folder].add(name)

    @property
    def pids(self) -> frozenset[int]:
        """No process: nothing acts here, and the archive contains none of the host's processes."""
        return frozenset()

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first bytes of a file."""
        node = self._find(path)
        if not isinstance(node, File) or node.read is None:
            raise fails(errno.EISDIR, path)
        content = node.read()
        return (content.encode() if isinstance(content, str) else content)[:limit]

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Fail with EROFS: an archived host can't be changed."""
        raise fails(errno.EROFS, f"{path} ({len(data)} bytes)")

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder, also of files that could not be read on the host."""
        self._fail_as_on_host(path)
        return [*{*self.tree.folder(path).entries, *self._unread_in.get(path, ())}]

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        node = self._find(path, follow=False)
        if not isinstance(node, Link):
            raise fails(errno.EINVAL, path)
        return node.target

    def device_number(self, path: HostPath, /) -> int:
        """Return 0 for each path that exists: device nodes are archived as empty files."""
        self._find(path)
        return 0

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        """Fail: the archive does not record which processes had a group open."""
        raise LeaseUnavailableError(f"IOMMU group {group} can't be opened: its host is in a support archive")

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        """Fail: the archive does not record which processes had a device open."""
        raise LeaseUnavailableError(f"{', '.join(names)} can't be opened: the host is in a support archive")

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:  # noqa: ARG002
        """Fail: the archive contains no processes."""
        raise fails(errno.ENOENT, "/proc")

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Never call `wake`: an archive does not change."""
        del wake
        return lambda: None

    def _find(self, path: HostPath, *, follow: bool = True) -> Node:
        self._fail_as_on_host(path)
        return self.tree.find(path, follow=follow)

    def _fail_as_on_host(self, path: HostPath) -> None:
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

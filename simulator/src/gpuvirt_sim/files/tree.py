"""A file system in memory: folders, files with callbacks, links and device nodes, with the kernel's errnos."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from gpuvirt.paths import HostPath

MOST_LINKS = 40
"""Links followed in one path before ELOOP, as Linux does (fs/namei.c)."""

DEVICE_NUMBERS = HostPath("/sys/dev/char")
"""One link for each character device, named by its number, to its folder (device_create_sys_dev_entry)."""


class Folder(msgspec.Struct, eq=False):
    """A folder."""

    entries: dict[str, "Node"] = msgspec.field(default_factory=dict)


class File(msgspec.Struct, eq=False):
    """A file with callbacks for each read and each write."""

    read: Callable[[], str | bytes] | None = None
    """None: not readable (mode 0200)."""
    write: Callable[[str], None] | None = None
    """None: not writable (mode 0444)."""


class Link(msgspec.Struct, eq=False):
    """A symbolic link."""

    target: str


class DeviceNode(msgspec.Struct, eq=False):
    """A character device."""

    number: int


Node = Folder | File | Link | DeviceNode


def fails(number: int, path: str) -> OSError:
    """Return the OSError that the kernel would cause."""
    return OSError(number, os.strerror(number), path)


def constant(content: str) -> File:
    """Return a file with the constant content `content` and a newline."""
    return File(read=lambda: content + "\n")


def relative(target: HostPath, *, of_link: HostPath) -> str:
    """Return the text of a link at `of_link` that points to `target`, relative as sysfs writes it.

    The text ends with the target's name, also where the link is below its target (kernfs_get_target_path).
    """
    above, _, name = target.rpartition("/")
    folder = os.path.relpath(above or "/", os.path.dirname(of_link))  # noqa: PTH120  host paths are texts, not files
    return name if folder == "." else f"{folder}/{name}"


class Tree:
    """The root folder, and ways to find and place nodes in it."""

    def __init__(self) -> None:
        self.root = Folder()
        self._numbered: dict[str, HostPath] = {}
        """The folder of each device whose number an attribute `dev` shows."""
        self._found: dict[tuple[HostPath, bool], tuple[HostPath, Node]] = {}
        """The nodes of paths, until a node is replaced or removed: a scan resolves the same thousands each time."""
        self._missing: dict[tuple[HostPath, bool], int] = {}
        """The errnos of paths that lead nowhere, until a node is placed."""

    def find(self, path: HostPath, *, follow: bool = True) -> Node:
        """Return the node at `path`; `follow`: whether to follow a link that is the last component."""
        return self._resolve(path, follow=follow)[1]

    def folder(self, path: HostPath) -> Folder:
        """Return the folder at `path`."""
        node = self.find(path)
        if not isinstance(node, Folder):
            raise fails(errno.ENOTDIR, path)
        return node

    def make(self, path: HostPath) -> Folder:
        """Return the folder at `path`; create it and the folders above it where they are missing."""
        folder = self.root
        for name in _parts(path):
            child = folder.entries.get(name)
            if child is None:
                child = folder.entries[name] = Folder()
                self._missing = {}
            if not isinstance(child, Folder):
                raise fails(errno.ENOTDIR, path)
            folder = child
        return folder

    def place(self, path: HostPath, node: Node) -> None:
        """Put `node` at `path`, in place of an existing node."""
        above, _, name = path.rpartition("/")
        entries = self.make(HostPath(above)).entries
        replaces = name in entries
        entries[name] = node
        self._missing = {}
        if replaces:
            self._found = {}
        if name == "dev" and path.startswith("/sys/") and isinstance(node, File) and node.read is not None:
            self._number(HostPath(above), str(node.read()).strip())

    def _number(self, device: HostPath, number: str) -> None:
        """Link the number of a device to its folder, as the kernel does for each device that has a node."""
        if not self._numbered.get(number):
            self._numbered[number] = device
            self.link(HostPath(f"{DEVICE_NUMBERS}/{number}"), device)

    def link(self, path: HostPath, target: HostPath) -> None:
        """Put a relative link to `target` at `path`."""
        self.place(path, Link(relative(target, of_link=path)))

    def remove(self, path: HostPath) -> None:
        """Remove the node at `path` with its content; do nothing where it does not exist."""
        above, _, name = path.rpartition("/")
        try:
            self.folder(HostPath(above)).entries.pop(name, None)
        except OSError:
            return
        if path.startswith("/sys/"):
            gone = f"{self.real_path(HostPath(above))}/{name}"
            for number in [number for number, device in self._numbered.items() if f"{device}/".startswith(f"{gone}/")]:
                del self._numbered[number]
                self.remove(HostPath(f"{DEVICE_NUMBERS}/{number}"))  # not there where all of /sys/dev was removed
        self._found, self._missing = {}, {}

    def exists(self, path: HostPath) -> bool:
        """Return whether there is a node at `path`; a dangling link counts."""
        try:
            self.find(path, follow=False)
        except OSError:
            return False
        return True

    def walk(self) -> Iterator[tuple[HostPath, Node]]:
        """Yield every node with its path, folders before their content."""
        todo: list[tuple[str, Folder]] = [("", self.root)]
        while todo:
            above, folder = todo.pop()
            for name, node in folder.entries.items():
                path = f"{above}/{name}"
                yield HostPath(path), node
                if isinstance(node, Folder):
                    todo.append((path, node))

    def real_path(self, path: HostPath) -> HostPath:
        """Return the real path of `path`, with all links resolved."""
        return self._resolve(path, follow=True)[0]

    def _resolve(self, path: HostPath, *, follow: bool) -> tuple[HostPath, Node]:
        # Another thread may change the tree meanwhile: then this answer is kept in a mapping that is used no more.
        key, found, missing = (path, follow), self._found, self._missing
        if (known := found.get(key)) is not None:
            return known
        if (number := missing.get(key)) is not None:
            raise fails(number, path)
        try:
            return found.setdefault(key, self._walk_to(path, follow=follow))
        except OSError as error:
            missing[key] = error.errno or errno.ENOENT
            raise

    def _walk_to(self, path: HostPath, *, follow: bool) -> tuple[HostPath, Node]:
        ahead, names, above = [part for part in reversed(path.split("/")) if part], list[str](), [self.root]
        links = 0
        while ahead:
            name = ahead.pop()
            child = above[-1].entries.get(name)
            if type(child) is Folder:
                above.append(child)
                names.append(name)
            elif name in {"..", "."}:
                if name == ".." and names:
                    above.pop()
                    names.pop()
            elif type(child) is Link and (ahead or follow):
                links += 1
                if links > MOST_LINKS:
                    raise fails(errno.ELOOP, path)
                if child.target.startswith("/"):
                    del above[1:], names[:]
                ahead += [part for part in reversed(child.target.split("/")) if part]
            elif child is None or ahead:
                raise fails(errno.ENOENT if child is None else errno.ENOTDIR, path)
            else:
                return HostPath("/".join(["", *names, name])), child
        return HostPath("/" + "/".join(names)), above[-1]


def _parts(path: str) -> Sequence[str]:
    return [part for part in path.split("/") if part and part != "."]

"""Copies the files of a host besides its devices: only those that doctor reads, each at its own path."""

import re
from posixpath import dirname

from gpuvirt.archive import Folder, Symlink
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Link, Listing, Presence
from gpuvirt.facts.setup import Part, parts
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.archives.copying import Copying, is_safe
from gpuvirt.hardware.host.platform import MODULES, read_setup
from gpuvirt.paths import HostPath

LAID_OUT = ("/sys/class/iommu", "/sys/kernel/iommu_groups", "/sys/bus/pci/devices/")
"""The folders that are copied with the devices, including links."""
SCREENS = "/sys/class/graphics/"
OF_FOLDERS = ("/sys/module", "/sys/class/iommu")
"""Folders whose entries are folders; the entries of others are files."""
NODES = HostPath("/sys/devices/system/node")
UNSAFE = "a name that is not safe in an archive"
_NODE = re.compile(r"node[0-9]{1,4}")


def copy_platform(copying: Copying) -> None:
    """Copy the files that `read_setup` reads, and list those that it could not read."""
    setup = read_setup(copying.kernel, Facts(), ())
    for part in parts(setup).values():
        if not part.path.startswith(LAID_OUT):
            _copy(copying, part)
    for name in copying.names(NODES):
        if _NODE.fullmatch(name):
            copying.file(HostPath(f"{NODES}/{name}/cpulist"), HostPath(f"{NODES}/{name}"))


def _copy(copying: Copying, part: Part) -> None:
    target = part.target if isinstance(part, Link) else None
    names = part.path.split("/")[1:] + ([target] if isinstance(target, str) else [])
    if not all(map(is_safe, names)):
        copying.unread.append(Unread(part.path, seen=UNSAFE))
    elif (unread := _unread(part)) is None:
        _copy_read(copying, part)
    elif unread.errno is None:
        copying.text(part.path)  # the file can be read, but not parsed
    else:
        copying.unread.append(unread)


def _unread(part: Part) -> Unread | None:
    match part:
        case Attribute(_, Unread() as unread) | Listing(_, Unread() as unread) | Link(_, Unread() as unread):
            return unread
        case Presence(_, Unread() as unread):
            return unread
        case _:
            return None


def _copy_read(copying: Copying, part: Part) -> None:
    match part:
        case Attribute(path, str(text)):
            copying.members[path] = f"{text}\n".encode()
        case Attribute(path, None) if path.startswith(SCREENS):
            copying.members.setdefault(HostPath(dirname(path)), Folder())  # a framebuffer may have no name
        case Listing(path, tuple(names)) if path.startswith(MODULES):
            copying.members[path] = "".join(f"{name}.ko:\n" for name in names).encode()
        case Listing(path, tuple(names)):
            _copy_names(copying, path, names)
        case Link(path, str(target)):
            copying.members[path] = Symlink(f"../../../{target}")
        case Presence(path, exists=True):
            copying.members[path] = Folder() if path.endswith("/entries") else b""
        case _:  # the file does not exist
            return


def _copy_names(copying: Copying, path: HostPath, names: tuple[str, ...]) -> None:
    copying.members.setdefault(path, Folder())
    for name in names:
        if is_safe(name):
            copying.members.setdefault(HostPath(f"{path}/{name}"), Folder() if path in OF_FOLDERS else b"")
        else:
            copying.unread.append(Unread(HostPath(f"{path}/{name}"), seen=UNSAFE))

"""Writes support archives: small files, links and folders of a host in one tar.gz, with a manifest.

A person can inspect an archive before sending it. gpuvirt's simulator reads it.
"""

import gzip
import io
import tarfile
from collections.abc import Mapping
from datetime import datetime

import msgspec

FORMAT = 1
MANIFEST = "MANIFEST.json"
HOST = "host"
"""The archive's folder for the host's `/`, which `gpuvirt devices --host-root` can read."""

MOST_FILE_BYTES = 1 << 20
"""The limit for each file of the host."""


class Symlink(msgspec.Struct, frozen=True):
    """A symbolic link."""

    target: str


class Folder(msgspec.Struct, frozen=True):
    """A folder, which may be empty."""


Entry = bytes | Symlink | Folder
Members = Mapping[str, Entry]
"""Files, links and folders by their path below the archive's top folder:
`host/sys/bus/pci/devices/0000:65:00.0`."""


class NotRead(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that exists and could not be read."""

    path: str
    errno: int | None = None
    why: str = ""
    """The name and meaning of the errno, or the content that was found."""


class LeftOut(msgspec.Struct, frozen=True):
    """A file, or a part of files, that was left out on purpose."""

    what: str
    why: str


class ArchivedSection(msgspec.Struct, frozen=True):
    """The description of a part of the archive."""

    name: str
    about: str
    files: int
    bytes: int


class ArchiveManifest(msgspec.Struct, frozen=True):
    """The description of an archive."""

    format: int
    gpuvirt: str
    """The version of gpuvirt that wrote the archive."""
    at: datetime
    node: str
    names_hidden: bool
    privileged: bool
    """Whether root collected the files; other users can read fewer."""
    collected: tuple[ArchivedSection, ...] = ()
    unread: tuple[NotRead, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def pack(top: str, manifest: ArchiveManifest, members: Members) -> bytes:
    """Return an archive whose members are all in the folder `top`; the manifest is the first member."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    packed = io.BytesIO()
    moment = int(manifest.at.timestamp())
    with (
        gzip.GzipFile("", "wb", fileobj=packed, mtime=moment) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, entry in [(MANIFEST, content), *sorted(members.items())]:
            member, body = _member(f"{top}/{path}", entry)
            member.mtime = moment
            tar.addfile(member, body)
    return packed.getvalue()


def _member(name: str, entry: Entry) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    member = tarfile.TarInfo(name)
    match entry:
        case Symlink():
            member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.target, 0o777
        case Folder():
            member.type, member.mode = tarfile.DIRTYPE, 0o755
        case bytes():
            member.size, member.mode = len(entry), 0o644
            return member, io.BytesIO(entry)
    return member, None

"""Reads support archives as untrusted files: nothing is extracted to a disk, and all sizes are limited."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath

import msgspec
from typing_extensions import override

from gpuvirt.archive import (
    FORMAT,
    HOST,
    MANIFEST,
    MOST_FILE_BYTES,
    ArchiveManifest,
    Entry,
    Folder,
    Members,
    Symlink,
)
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError

MOST_UNPACKED_BYTES = 192 << 20
MOST_MEMBERS = 200_000
MOST_PATH = 1024
MOST_SHOWN = 120
"""The characters of an untrusted name that a message shows."""


class Opened(msgspec.Struct, frozen=True):
    """The manifest and the host's files of an archive."""

    manifest: ArchiveManifest
    host: Members
    """By path below the host's `/`, without a leading slash: `sys/bus/pci`."""


def unpack(packed: io.BufferedIOBase) -> Opened:
    """Return the manifest and the host's files; raise DamagedError for a damaged, foreign or malicious archive."""
    manifest: ArchiveManifest | None = None
    host: dict[str, Entry] = {}
    try:
        with (
            gzip.GzipFile(fileobj=packed) as stream,
            _Bounded(stream) as bounded,
            tarfile.open(fileobj=bounded, mode="r|") as tar,
        ):
            for path, member in _checked(tar):
                if path.parts[1:] == (MANIFEST,) and manifest is None:
                    manifest = _manifest(_content(tar, member))
                elif path.parts[1:2] == (HOST,) and len(path.parts) > 2:
                    host["/".join(path.parts[2:])] = _entry(tar, member)
            while bounded.read(tarfile.RECORDSIZE):  # up to the checksum at the end
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise DamagedError(f"is not a complete tar.gz: {problem}; ask for the file again") from error
    if manifest is None:
        raise DamagedError(f"is not a support archive of gpuvirt: it has no {MANIFEST}")
    return Opened(manifest, host)


class _Bounded(io.RawIOBase):
    """A stream that raises an error when it becomes too large, since a few bytes of gzip can expand to any size."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MOST_UNPACKED_BYTES

    @override
    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise DamagedError(f"unpacks to more than {MOST_UNPACKED_BYTES >> 20} MiB, the limit of support archives")
        return content


def _checked(tar: tarfile.TarFile) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo]]:
    """Yield the members with their paths; raise DamagedError unless all are in one folder, and of allowed types."""
    top: str | None = None
    for count, member in enumerate(tar, 1):
        if count > MOST_MEMBERS:
            raise DamagedError(f"has more than {MOST_MEMBERS:,} members, the limit of support archives")
        path = PurePosixPath(member.name)
        top = top or path.parts[0] if path.parts else top
        if path.is_absolute() or ".." in path.parts or not path.parts or len(member.name) > MOST_PATH:
            raise DamagedError(f"has a member outside its folder: {_printable(member.name)}")
        if path.parts[0] != top:
            raise DamagedError(f"has a member outside its folder {_printable(top or '')}: {_printable(member.name)}")
        if not (member.isreg() or member.issym() or member.isdir()) or member.issparse():
            raise DamagedError(f"has a member that is not a file, link or folder: {_printable(member.name)}")
        if member.issym():
            _check_link(path, member.linkname)
        yield path, member


def _check_link(path: PurePosixPath, target: str) -> None:
    """Raise DamagedError for a link that leads out of the host's folder."""
    inside = path.parts[1:2] == (HOST,)
    depth = len(path.parts) - 3  # folders of the host above the link
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            break
    if not inside or depth < 0 or target.startswith("/") or not target or len(target) > MOST_PATH:
        raise DamagedError(f"has a link that leads out of its folder: {_printable(str(path))} -> {_printable(target)}")


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    if member.issym():
        return Symlink(member.linkname)
    return Folder() if member.isdir() else _content(tar, member)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not 0 <= member.size <= MOST_FILE_BYTES:
        raise DamagedError(
            f"{_printable(member.name)} has {member.size:,} bytes; expected at most {MOST_FILE_BYTES >> 20} MiB"
        )
    file = tar.extractfile(member)
    content = file.read() if file is not None else b""
    if len(content) != member.size:
        raise DamagedError(f"ends within {_printable(member.name)}; ask for the file again")
    return content


def _manifest(content: bytes) -> ArchiveManifest:
    try:
        found = from_json(content, _Format).format
        manifest = from_json(content, ArchiveManifest) if found == FORMAT else None
    except DamagedError as error:
        raise DamagedError(f"has a {MANIFEST} that is damaged or of another program: {error}") from error
    if manifest is None:
        raise DamagedError(
            f"has format {found}, but this gpuvirt reads {FORMAT}; use the version of gpuvirt that wrote it"
        )
    return manifest


class _Format(msgspec.Struct, frozen=True):
    format: int


def _printable(text: str) -> str:
    """Return an untrusted name, escaped and shortened for a terminal."""
    shown = ascii(text[: MOST_SHOWN + 1])[1:-1]
    return shown if len(text) <= MOST_SHOWN else f"{shown}..."

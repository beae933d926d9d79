"""The format of a state on disk: its fields, with a version and a digest.

An older gpuvirt can be installed again at any time. It reads the fields that it knows from a file of a newer version,
and keeps the others.
"""

import hashlib
import re
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.plain import Plain

T = TypeVar("T")

Fields = dict[str, Plain]
"""The fields of a file, before they are converted to a type."""


class FileLayout(Protocol):
    """The layout of a file: the places of the version, the digest and the fields."""

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        ...

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        ...


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    sha256: str


class HeaderLine:
    """Two lines: a header with the digest of the second line, and the fields.

    Version 0.1 reads some files only in this layout, and others only in the other one.
    """

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        body = msgspec.json.encode(fields)
        return msgspec.json.encode(_Header(version, _digest(body))) + b"\n" + body + b"\n"

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        head, _, rest = content.partition(b"\n")
        body = rest.removesuffix(b"\n")
        header = from_json(head, _Header)
        if _digest(body) != header.sha256:
            raise DamagedError("its digest (sha256) does not match its content")
        return _fields(body), header.version


_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n?\Z')


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class DigestField:
    """One JSON object, with `version` as its first field and the digest of all bytes before it as its last."""

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        text = msgspec.json.format(msgspec.json.encode({"version": version, **fields}), indent=1)
        checked = text.removesuffix(b"\n}")
        return checked + b',\n "sha256": "%s"\n}\n' % _digest(checked).encode()

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        version = from_json(content, _Versioned).version
        digest = _DIGEST.search(content)
        if digest is None:
            raise DamagedError("it has no digest (sha256)")
        if _digest(content[: digest.start()]) != digest[1].decode():
            raise DamagedError("its digest (sha256) does not match its content")
        fields = _fields(content)
        return {name: value for name, value in fields.items() if name not in {"version", "sha256"}}, version


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fields(body: bytes) -> Fields:
    from_json(body, dict[str, msgspec.Raw])
    fields: Fields = msgspec.json.decode(body)
    return fields


class NewerVersionError(DamagedError):
    """A file of a newer version has a known field with an unreadable value. The file is not damaged."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


NO_FIELDS: Fields = {}


class Stored(NamedTuple, Generic[T]):
    """The state in a file."""

    value: T
    unknown: Fields = NO_FIELDS
    """The fields of a newer version."""


class Format(msgspec.Struct, Generic[T], frozen=True):
    """The format of files with values of one type, which encodes all of its fields."""

    shape: type[T]
    layout: FileLayout
    version: int = 1
    """The version of written files; older files are refused."""
    removed: frozenset[str] = frozenset()
    """The fields of version 0.1 that this version neither reads nor keeps."""

    def encode(self, value: T, unknown: Fields = NO_FIELDS) -> bytes:
        """Return the content of a file."""
        return self.layout.join({**unknown, **_known(value)}, self.version)

    def decode(self, content: bytes) -> Stored[T]:
        """Return the state in a file; raise DamagedError."""
        fields, version = self.layout.split(content)
        if version < self.version:
            raise DamagedError(f"its version is {version}; expected {self.version}")
        try:
            value = msgspec.convert(fields, self.shape)
        except msgspec.ValidationError as error:
            if version > self.version:
                raise NewerVersionError(
                    f"its version is {version}, but this gpuvirt only knows versions up to {self.version}: {error}",
                    version,
                ) from error
            raise DamagedError(f"its content is invalid: {error}") from error
        known = {*_known(value), *self.removed}
        return Stored(value, {name: field for name, field in fields.items() if name not in known})


def _known(value: object) -> Fields:
    """Return the fields of a value in the form of a file."""
    fields: Fields = msgspec.json.decode(msgspec.json.encode(value))
    return fields

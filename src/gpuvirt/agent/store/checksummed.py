"""The layouts of checksummed files: the places of the version, the digest and the fields."""

import hashlib
import re
from typing import Protocol

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.plain import Plain

Fields = dict[str, Plain]
"""The fields of a file, before they are converted to a type."""


class FileLayout(Protocol):
    """The layout of a file with fields and their version."""

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        ...

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        ...


class _Header(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    version: int
    sha256: str
    format: int | None = None


class HeaderLine:
    """Two lines: a header with the digest of the second line, and the fields.

    The first gpuvirt with this layout accepts only headers with `"version": 1`, and renames other files. So that this
    version can be installed again, the header always has `"version": 1`, and later versions are in `format`.
    """

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        body = msgspec.json.encode(fields)
        header = _Header(1, _digest(body), version if version > 1 else None)
        return msgspec.json.encode(header) + b"\n" + body + b"\n"

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        head, _, rest = content.partition(b"\n")
        body = rest.removesuffix(b"\n")
        header = from_json(head, _Header)
        if _digest(body) != header.sha256:
            raise DamagedError("its digest (sha256) does not match its content")
        return _fields(body), header.format if header.format is not None else header.version


_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n?\Z')
_UNCHECKED_VERSION = 1
"""The version of `DigestField` without a digest."""


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class DigestField:
    """One JSON object, with `version` as its first field and, from version 2 on, the digest as its last.

    The digest covers all bytes before it. Readers without support for digests ignore the field.
    """

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        text = msgspec.json.format(msgspec.json.encode({"version": version, **fields}), indent=1)
        checked = text.removesuffix(b"\n}")
        return checked + b',\n "sha256": "%s"\n}\n' % _digest(checked).encode()

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        version = from_json(content, _Versioned).version
        found = _DIGEST.search(content)
        if found is None and version > _UNCHECKED_VERSION:
            raise DamagedError("it has no digest (sha256)")
        if found is not None and _digest(content[: found.start()]) != found[1].decode():
            raise DamagedError("its digest (sha256) does not match its content")
        fields = _fields(content)
        return {name: value for name, value in fields.items() if name not in {"version", "sha256"}}, version


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fields(body: bytes) -> Fields:
    from_json(body, dict[str, msgspec.Raw])
    fields: Fields = msgspec.json.decode(body)
    return fields

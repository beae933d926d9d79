"""The layouts of checksummed files: where the version, the digest and the fields of a state stand."""

import hashlib
import re
from typing import Protocol

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.plain import Plain

Fields = dict[str, Plain]
"""What a file says, before it is read as a type."""


class Layout(Protocol):
    """How fields and their version become the content of a file."""

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
    """Two lines: a header with the digest of the second line's bytes, and the fields.

    The first gpuvirt with this layout puts a file aside unless its header says `"version": 1`. So that it can be
    installed again, the header goes on saying so, and a later version stands in `format`.
    """

    def join(self, fields: Fields, version: int) -> bytes:
        """Return the content of a file."""
        body = msgspec.json.encode(fields)
        header = _Header(1, _digest(body), version if version > 1 else None)
        return msgspec.json.encode(header) + b"\n" + body + b"\n"

    def split(self, content: bytes) -> tuple[Fields, int]:
        """Return the fields of a file and their version; raise DamagedError."""
        head, newline, rest = content.partition(b"\n")
        body = rest.removesuffix(b"\n")
        header = from_json(head, _Header)
        if not newline or _digest(body) != header.sha256:
            raise DamagedError("its digest is not that of its content")
        return _fields(body), header.format if header.format is not None else header.version


_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n?\Z')
_UNCHECKED_VERSION = 1
"""The version of `DigestField` that had no digest."""


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class DigestField:
    """One JSON object, with `version` as its first field and, from version 2 on, the digest as its last.

    The digest is that of all bytes before it. A reader that knows nothing of digests passes over the field.
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
            raise DamagedError("it has no digest")
        if found is not None and _digest(content[: found.start()]) != found[1].decode():
            raise DamagedError("its digest is not that of its content")
        fields = _fields(content)
        return {name: value for name, value in fields.items() if name not in {"version", "sha256"}}, version


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fields(body: bytes) -> Fields:
    from_json(body, dict[str, msgspec.Raw])
    fields: Fields = msgspec.json.decode(body)
    return fields

"""The form of the agent's own files: two lines, a header with the digest of the second's bytes, and the content."""

import hashlib

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError


class _Header(msgspec.Struct, frozen=True):
    version: int
    sha256: str


def seal(body: bytes, version: int) -> bytes:
    """Return the content of a file that holds `body`, which has no line ends."""
    return msgspec.json.encode(_Header(version, hashlib.sha256(body).hexdigest())) + b"\n" + body + b"\n"


def unseal(content: bytes, version: int) -> bytes:
    """Return the body of a file of this version; raise DamagedError."""
    head, newline, rest = content.partition(b"\n")
    body = rest.removesuffix(b"\n")
    header = from_json(head, _Header)
    if header.version != version:
        raise DamagedError(f"it is of version {header.version}, and this gpuvirt reads {version}")
    if not newline or hashlib.sha256(body).hexdigest() != header.sha256:
        raise DamagedError("its digest is not that of its content")
    return body

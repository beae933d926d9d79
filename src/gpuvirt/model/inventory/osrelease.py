"""The operating system of a host by `/etc/os-release`. Source of the grammar and the keys: os-release(5)."""

import re

import msgspec

DEFAULT_ID = "linux"
"""The ID of a system whose file has none."""

_LINE = re.compile(r"""\s*([A-Z][A-Z0-9_]*)=(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s"']*))\s*""")
_ESCAPED = re.compile(r"\\(.)")


class OsRelease(msgspec.Struct, frozen=True):
    """An operating system."""

    id: str
    """`ubuntu`, `rhel`, `rhcos`."""
    version_id: str | None
    """`22.04`; None for a system without versions."""


def parse(text: str) -> OsRelease:
    """Return the operating system of a file. Lines without an assignment are ignored; a later assignment wins."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        if match := _LINE.fullmatch(line):
            key, double, single, bare = match.groups()
            values[key] = _ESCAPED.sub(r"\1", double) if double is not None else single or bare or ""
    return OsRelease(values.get("ID") or DEFAULT_ID, values.get("VERSION_ID") or None)

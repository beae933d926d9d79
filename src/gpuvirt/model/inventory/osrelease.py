"""What `/etc/os-release` says: which system a host runs. Source of the grammar and the keys: os-release(5)."""

import re
from dataclasses import dataclass

DEFAULT_ID = "linux"
"""What a system is that says no ID."""

_LINE = re.compile(r"""\s*([A-Z][A-Z0-9_]*)=(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s"']*))\s*""")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class OsRelease:
    """Which system it is."""

    id: str
    """`ubuntu`, `rhel`, `rhcos`."""
    version_id: str | None
    """`22.04`; None for a system that has no versions."""


def parse(text: str) -> OsRelease:
    """Return what a file says; lines that are no assignments are passed over, and of two the later counts."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        if match := _LINE.fullmatch(line):
            key, double, single, bare = match.groups()
            values[key] = _ESCAPED.sub(r"\1", double) if double is not None else single or bare or ""
    return OsRelease(values.get("ID") or DEFAULT_ID, values.get("VERSION_ID") or None)

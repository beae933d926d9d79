"""Plain values (strings, numbers, lists, mappings) with their positions, from YAML texts and to them.

YAML is read as `yamlsyntax` describes it, which the first document loads.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from gpuvirt.errors import ConfigError

if TYPE_CHECKING:
    from gpuvirt import yamlsyntax

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""The content of a YAML document."""

MOST_SHOWN = 300
"""The most characters of a message or path; a text in a file may be longer."""

STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
"""A step of a path as msgspec writes it: `.name`, `[0]`, or `[...]` for any key or value of a mapping."""

ANY = "[...]"
"""The step that msgspec writes for a key or value of a mapping."""

Step = str | int
"""A step into a document: the key of a mapping, whatever characters it has, or the index of a list."""


def write(content: Plain) -> str:
    """Return `content` as YAML: innermost lists and mappings on one line where they fit, multi-line strings as
    blocks."""
    from gpuvirt import yamlsyntax

    return yamlsyntax.write(content)


class Document(msgspec.Struct, frozen=True):
    """The content of a YAML text, and the lines of its values."""

    content: Plain
    _text: "yamlsyntax.YamlContent"

    def line(self, steps: Sequence[Step]) -> int:
        """Return the line of the deepest existing node on the way that `steps` describe."""
        return self._text.line(steps)


def read(text: str, *, where: str) -> Document:
    """Return the YAML `text`; raise ConfigError. `where` is its origin in messages."""
    from gpuvirt import yamlsyntax

    try:
        found = yamlsyntax.read(text)
    except yamlsyntax.YamlSyntaxError as fault:
        place = f"{where}:{fault.line}" if fault.line is not None else where
        raise ConfigError(one_line(fault.message), where=place, path=one_line(path_of(fault.steps))) from fault
    return Document(cast("Plain", found.value), found)


def one_line(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text on one line, shortened to `most` characters and `...`."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def path_of(steps: Sequence[Step]) -> str:
    """Return steps as a path: `$.modes.a[0]`."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)

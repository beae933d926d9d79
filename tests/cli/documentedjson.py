"""The shapes of JSON that docs/reference/json.md documents, and whether a document has one."""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from gpuvirt.plain import Plain

REFERENCE = (Path(__file__).parent.parent.parent / "docs/reference/json.md").read_text()


def table(heading: str) -> Mapping[str, str]:
    """Return the rows of the table below a heading."""
    rows = REFERENCE.partition(f"{heading}\n|---|---|\n")[2].partition("\n\n")[0].partition("\n<!--")[0]
    cells = (re.split(r"(?<!\\)\|", row.strip("|"), maxsplit=1) for row in rows.splitlines())
    return {name.strip().strip("`").replace("\\|", "|"): text.strip() for name, text in cells}


PRINTS = table("| `gpuvirt ... -o json` | prints |")
OBJECTS = {
    name: {field: shape or "text" for field, shape in re.findall(r"`([^`]+)`(?: (.*?))?(?:; (?=`)|$)", text)}
    for name, text in table("| object | fields |").items()
}


def fits(value: Plain, words: str) -> bool:
    """Return whether a value has the documented shape."""
    if words.endswith("?"):
        return value is None or fits(value, words.removesuffix("?"))
    if words.endswith("[]"):
        return isinstance(value, list) and all(fits(item, words.removesuffix("[]")) for item in value)
    if words.endswith("{}"):
        return isinstance(value, dict) and all(fits(member, words.removesuffix("{}")) for member in value.values())
    words = words.removeprefix("(").removesuffix(")")
    if words.startswith("one of "):
        return value in re.findall(r"`([^`]+)`", words)
    return any(_fits(value, alternative) for alternative in words.split(" or "))


def _fits(value: Plain, words: str) -> bool:
    match value:
        case dict():
            fields = OBJECTS.get(words, {})
            return fields.keys() == value.keys() and all(fits(value[name], text) for name, text in fields.items())
        case str():
            return words in {"text", "code"} or (words == "time" and _is_time(value))
        case bool():
            return words == "boolean"
        case _:
            return words == "number" and isinstance(value, int | float)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False

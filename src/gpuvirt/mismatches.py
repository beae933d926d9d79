"""Says in plain words why a value of a document has not the expected kind: "expected a list, found text 'a'".

msgspec names kinds by Python's and JSON's types, and shows at most the kind of what it found. Other messages stay as
they are.
"""

import json
import re
from math import isinf

from gpuvirt.plain import one_line

KINDS = {
    "array": "a list",
    "object": "a mapping",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "bytes": "text in base64",
    "datetime": "a time as text",
}
MOST_SHOWN = 60
"""The characters that are shown of a text that was found."""

_KIND = re.compile(r"^Expected `(?P<kinds>[^`]+)`(?: (?P<limit>(?!, got).+?))?(?:, got `(?P<got>[^`]+)`)?$", re.DOTALL)
_LENGTH = re.compile(r"^of length (?P<sign>[<>]=) (?P<number>\d+)$")
_PATTERN = re.compile(r"^matching regex (?P<pattern>.+)$", re.DOTALL)
_LACKS = re.compile(r"^Object missing required field `(?P<name>.+)`$")


def worded(message: str, found: str | None) -> str:
    """Return msgspec's message in plain words; `found` is the value that it is about in words (`shown`), None where
    only msgspec has seen it."""
    if lacking := _LACKS.match(message):
        return f"lacks the key {lacking['name']}"
    if (mismatch := _KIND.match(message)) is None:
        return message
    kinds = [KINDS.get(kind, kind) for kind in mismatch["kinds"].split(" | ") if kind != "null"]
    expected = f"expected {_any_of(kinds or ['nothing'])}{_limit(mismatch['limit'])}"
    found = found or {**KINDS, "null": "nothing"}.get(mismatch["got"] or "")
    return f"{expected}, found {found}" if found else expected


def shown(value: object) -> str:
    """Return a found value in words: the kind, and the value itself if it is short."""
    match value:
        case None | bool():
            return {None: "nothing", True: "true", False: "false"}[value]
        case int() | float():
            is_infinite = isinstance(value, float) and isinf(value)
            return "a number that is too large" if is_infinite else one_line(str(value), MOST_SHOWN)
        case str():
            return f"text {json.dumps(one_line(value, MOST_SHOWN), ensure_ascii=False)}"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "a mapping" if value else "an empty mapping"


def _any_of(kinds: list[str]) -> str:
    *others, last = kinds
    return f"{', '.join(others)} or {last}" if others else last


def _limit(limit: str | None) -> str:
    if limit is None:
        return ""
    if length := _LENGTH.match(limit):
        return f" with {'at least' if length['sign'] == '>=' else 'at most'} {length['number']} in it"
    if pattern := _PATTERN.match(limit):
        return f" that matches {pattern['pattern']}"
    return f" {limit}"

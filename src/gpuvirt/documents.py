"""Reads documents into typed records: YAML that people write, JSON that programs write.

An error in a YAML file is reported with file, line and `$.path`, in plain words: "expected a list, found text 'a'".
msgspec's messages have no lines and not the names that were expected, name kinds by Python's and JSON's types, and show
at most the kind of what was found; this module adds the rest. msgspec doesn't say in which value of a mapping an error
is, either: its path has `[...]` there, and its line is that of the mapping. Mappings of large values are read value by
value (`WrittenDocument.part`). A file has at most 1 MiB; `yamlsyntax` has further limits. `null_is_absent` is for
documents of Go programs (`nulls`).
"""

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from math import isinf
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import msgspec.inspect

from gpuvirt import nulls, plain
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.plain import Plain, Step

T = TypeVar("T")
P = TypeVar("P")

MOST_BYTES = 1 << 20
MOST_HINTED = 64
"""The characters of the longest word for which a similar one is searched."""
MOST_SHOWN = 60
"""The characters that are shown of a text that was found."""
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

_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_BAD_ENUM = re.compile(r"^Invalid enum value '?(.*?)'?$", re.DOTALL)
_KIND = re.compile(r"^Expected `(?P<kinds>[^`]+)`(?: (?P<limit>(?!, got).+?))?(?:, got `(?P<got>[^`]+)`)?$", re.DOTALL)
_LENGTH = re.compile(r"^of length (?P<sign>[<>]=) (?P<number>\d+)$")
_PATTERN = re.compile(r"^matching regex (?P<pattern>.+)$", re.DOTALL)
_LACKS = re.compile(r"^Object missing required field `(?P<name>.+)`$")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]+)`)?$", re.DOTALL)


class WrittenDocument(msgspec.Struct, Generic[T], frozen=True):
    """The content of a document with its positions, for errors that are found later."""

    value: T
    where: str
    document: plain.Document

    def place(self, steps: Sequence[Step]) -> str:
        """Return the origin and the line of the value at `steps`: `config.yaml:7`."""
        return f"{self.where}:{self.document.line(steps)}"

    def fault(self, message: str, steps: Sequence[Step]) -> ConfigError:
        """Return the error with this message for the value at `steps`."""
        return ConfigError(message, where=self.place(steps), path=plain.one_line(plain.path_of(steps)))

    def part(self, content: object, steps: Sequence[Step], shape: type[P]) -> P:
        """Return the `content` at `steps` as a `shape`; raise ConfigError. The fields above have no shape for it."""
        return _converted(content, shape, self.where, self.document, steps)


def load(path: Path, shape: type[T], *, null_is_absent: bool = False) -> T:
    """Return the document in the file `path` as a `shape`; raise ConfigError. An empty file is an empty mapping."""
    return parse(text_of(path), shape, where=str(path), null_is_absent=null_is_absent)


def text_of(path: Path) -> str:
    """Return the text of the file `path`; raise ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode() if len(content) <= MOST_BYTES else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", where=str(path)) from error
    if text is None:
        raise ConfigError(f"is too large; expected at most {MOST_BYTES >> 20} MiB of YAML", where=str(path))
    return text


def from_json(content: bytes, shape: type[T], *, null_is_absent: bool = False) -> T:
    """Return JSON as a `shape`; raise DamagedError."""
    try:
        return nulls.decode(content, shape) if null_is_absent else msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"cannot be parsed: {error}") from error


def parse(text: str, shape: type[T], *, where: str, null_is_absent: bool = False) -> T:
    """Return the YAML `text` as a `shape`; raise ConfigError. `where` is its origin in messages."""
    return parse_written(text, shape, where=where, null_is_absent=null_is_absent).value


def parse_written(text: str, shape: type[T], *, where: str, null_is_absent: bool = False) -> WrittenDocument[T]:
    """Return the YAML `text` as a `shape` with its positions; raise ConfigError. `where` is its origin in messages."""
    document = plain.read(text, where=where)
    content: Plain = document.content if document.content is not None else {}
    content = nulls.removed(content, shape) if null_is_absent else content
    return WrittenDocument(_converted(content, shape, where, document), where, document)


def shaped(content: Plain, shape: type[T], *, where: str) -> T:
    """Return an object that a user has stored at the API server, as a `shape`; raise ConfigError.

    `where` is its origin in messages. Null stands for an absent field.
    """
    return _converted(nulls.removed(content, shape), shape, where)


def _converted(
    content: object, shape: type[T], where: str, document: plain.Document | None = None, above: Sequence[Step] = ()
) -> T:
    """Return the content at the steps `above` of a document as a `shape`; raise ConfigError."""
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        message, path = _fault(error, content, shape)
        place = f"{where}:{document.line([*above, *_steps(path)])}" if document is not None else where
        whole = plain.path_of(above) + path.removeprefix("$")
        raise ConfigError(message, where=place, path=plain.one_line(whole)) from error


def _fault(error: msgspec.ValidationError, content: object, shape: type[T]) -> tuple[str, str]:
    """Return the message for an error in `content`, and the path to the value."""
    match = _AT.match(str(error))
    message, path = (match["message"], match["path"] or "$") if match else (str(error), "$")
    if unknown := _UNKNOWN.match(message):
        keys = list(_keys(msgspec.inspect.type_info(shape), path))
        known = f"{', '.join(keys) or 'none'}{_hint(unknown[1], keys)}"
        return f"no such key; expected one of: {known}", f"{path}.{unknown[1]}"
    if bad := _BAD_ENUM.match(message):
        members = list(_members(msgspec.inspect.type_info(shape), path))
        return f"expected one of: {', '.join(members)}; found {_shown(bad[1])}{_hint(bad[1], members)}", path
    return _worded(message, None if plain.ANY in path else _shown(_at(content, path))), path


def _worded(message: str, found: str | None) -> str:
    """Return msgspec's message in plain words; `found` is the value that it is about in words (`_shown`), None where
    only msgspec has seen it."""
    if lacking := _LACKS.match(message):
        return f"lacks the key {lacking['name']}"
    if (mismatch := _KIND.match(message)) is None:
        return message
    kinds = [KINDS.get(kind, kind) for kind in mismatch["kinds"].split(" | ") if kind != "null"]
    expected = f"expected {_any_of(kinds or ['nothing'])}{_limit(mismatch['limit'])}"
    found = found or {**KINDS, "null": "nothing"}.get(mismatch["got"] or "")
    return f"{expected}, found {found}" if found else expected


def _shown(value: object) -> str:
    """Return a found value in words: the kind, and the value itself if it is short."""
    match value:
        case None | bool():
            return {None: "nothing", True: "true", False: "false"}[value]
        case int() | float():
            is_infinite = isinstance(value, float) and isinf(value)
            return "a number that is too large" if is_infinite else plain.one_line(str(value), MOST_SHOWN)
        case str():
            return f"text {json.dumps(plain.one_line(value, MOST_SHOWN), ensure_ascii=False)}"
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


def _steps(path: str) -> list[Step]:
    """Return msgspec's path as steps, up to the first mapping whose key it doesn't have."""
    return [name or int(index) for name, index in plain.STEP.findall(path.partition(plain.ANY)[0])]


def _at(content: object, path: str) -> object:
    """Return the value at msgspec's path."""
    for step in _steps(path):
        if isinstance(content, dict):
            content = content.get(step)
        elif isinstance(content, list) and isinstance(step, int):
            content = content[step]
    return content


def _hint(found: str, known: Sequence[str]) -> str:
    near = get_close_matches(found.lower(), known, 1) if len(found) <= MOST_HINTED else []
    return f"; did you mean {near[0]}?" if near else ""


def _keys(shape: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the keys that `shape` allows at `path`."""
    for found in _shapes(shape, path):
        if isinstance(found, msgspec.inspect.StructType):
            yield from (field.encode_name for field in found.fields)


def _members(shape: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the values of the enum that `shape` has at `path`."""
    for found in _shapes(shape, path):
        if isinstance(found, msgspec.inspect.EnumType):
            yield from (str(member.value) for member in found.cls)


def _shapes(shape: msgspec.inspect.Type, path: str) -> Iterator[msgspec.inspect.Type]:
    """Yield the types that `shape` allows at `path`."""
    return _within(shape, [name for name, _ in plain.STEP.findall(path)])


def _within(shape: msgspec.inspect.Type, names: Sequence[str]) -> Iterator[msgspec.inspect.Type]:
    """Yield the types at the end of a path of field names; items of lists and values of mappings have no name."""
    match shape:
        case msgspec.inspect.Metadata():
            yield from _within(shape.type, names)
        case msgspec.inspect.UnionType():
            for member in shape.types:
                yield from _within(member, names)
        case _ if not names:
            yield shape
        case msgspec.inspect.StructType():
            for field in shape.fields:
                if field.encode_name == names[0]:
                    yield from _within(field.type, names[1:])
        case msgspec.inspect.DictType():
            yield from _within(shape.value_type, names[1:])
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield from _within(shape.item_type, names[1:])
        case _:
            pass

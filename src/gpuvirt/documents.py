"""Reads documents into typed records: YAML that people write, JSON that programs write.

An error in a YAML file is reported with file, line and `$.path`. msgspec's messages have no lines, and neither the keys
of mappings nor the names that were expected; this module adds them. A file has at most 1 MiB; `plain` has further
limits. `null_is_absent` is for documents of Go programs (`nulls`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import msgspec.inspect

from gpuvirt import mismatches, nulls, plain
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.plain import Plain, Step

T = TypeVar("T")

MOST_BYTES = 1 << 20
MOST_HINTED = 64
"""The characters of the longest word for which a similar one is searched."""

_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_BAD_ENUM = re.compile(r"^Invalid enum value '?(.*?)'?$")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]+)`)?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Written(Generic[T]):
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


def parse_written(text: str, shape: type[T], *, where: str, null_is_absent: bool = False) -> Written[T]:
    """Return the YAML `text` as a `shape` with its positions; raise ConfigError. `where` is its origin in messages."""
    document = plain.read(text, where=where)
    content: Plain = document.content if document.content is not None else {}
    content = nulls.removed(content, shape) if null_is_absent else content
    try:
        return Written(msgspec.convert(content, shape), where, document)
    except msgspec.ValidationError as error:
        message, steps = _fault(error, content, shape)
        place = f"{where}:{document.line(steps)}"
        raise ConfigError(message, where=place, path=plain.one_line(plain.path_of(steps))) from error


def shaped(content: Plain, shape: type[T], *, where: str) -> T:
    """Return an object that a user has stored at the API server, as a `shape`; raise ConfigError.

    `where` is its origin in messages. Null stands for an absent field.
    """
    content = nulls.removed(content, shape)
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        message, steps = _fault(error, content, shape)
        raise ConfigError(message, where=where, path=plain.one_line(plain.path_of(steps))) from error


def _fault(error: msgspec.ValidationError, content: Plain, shape: type[T]) -> tuple[str, Sequence[Step]]:
    """Return the message for an error in `content`, and the steps to the value."""
    message, path = _split(error)
    steps = _steps(content, shape, message, path)
    if unknown := _UNKNOWN.match(message):
        keys = list(_keys(msgspec.inspect.type_info(shape), path))
        known = f"{', '.join(keys) or 'none'}{_hint(unknown[1], keys)}"
        return f"no such key; expected one of: {known}", [*steps, unknown[1]]
    if bad := _BAD_ENUM.match(message):
        members = list(_members(msgspec.inspect.type_info(shape), path))
        found = mismatches.shown(_at(content, steps))
        return f"expected one of: {', '.join(members)}; found {found}{_hint(bad[1], members)}", steps
    return mismatches.worded(message, _at(content, steps)), steps


def _at(content: Plain, steps: Sequence[Step]) -> Plain:
    """Return the value at `steps`."""
    for step in steps:
        if isinstance(content, dict):
            content = content.get(str(step))
        elif isinstance(content, list):
            content = content[int(step)]
    return content


def _hint(found: str, known: Sequence[str]) -> str:
    near = get_close_matches(found.lower(), known, 1) if len(found) <= MOST_HINTED else []
    return f"; did you mean {near[0]}?" if near else ""


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return msgspec's message and path."""
    match = _AT.match(str(error))
    return (match["message"], match["path"] or "$") if match else (str(error), "$")


def _steps(content: Plain, shape: type[T], message: str, path: str) -> list[Step]:
    """Return msgspec's path to an error as steps, with the keys of mappings, which msgspec writes as `[...]`.

    Each key in turn is kept as the only one of its mapping, until the rest still has the same error.
    """
    steps: list[Step] = []
    # to_builtins copies a value at each of its aliases, so that a change affects only one position.
    whole: Plain = msgspec.to_builtins(content)
    inner = whole
    for name, index in plain.STEP.findall(path):
        step = name or index
        if index == "...":
            step = next((key for key in _each_alone(inner) if _fails(whole, shape, message, path)), None)
            if step is None:
                break
        if isinstance(inner, dict):
            steps.append(step)
            inner = inner.get(step)
        elif isinstance(inner, list):
            steps.append(int(step))
            inner = inner[int(step)]
    return steps


def _each_alone(mapping: Plain) -> Iterator[str]:
    """Yield each key of a mapping while the mapping has only this key."""
    if not isinstance(mapping, dict):
        return
    for name, value in list(mapping.items()):
        mapping.clear()
        mapping[name] = value
        yield name


def _fails(content: Plain, shape: type[T], message: str, path: str) -> bool:
    """Return whether a document has the same error."""
    try:
        msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        return _split(error) == (message, path)
    return False


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

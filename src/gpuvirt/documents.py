"""Documents read into typed records: YAML that people write, JSON that programs write.

What is wrong in a person's file is told with file, line and `$.path`.
A file holds at most 1 MiB, and `plain` says how much of what.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import msgspec.inspect

from gpuvirt import plain
from gpuvirt.errors import ConfigError, DamagedError

T = TypeVar("T")

MOST_BYTES = 1 << 20

_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_BAD_ENUM = re.compile(r"^Invalid enum value ")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]+)`)?$", re.DOTALL)


def load(path: Path, shape: type[T]) -> T:
    """Return the document in the file `path` as a `shape`, or raise ConfigError. An empty file is an empty mapping."""
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
    return parse(text, shape, where=str(path))


def from_json(content: bytes, shape: type[T]) -> T:
    """Return JSON as a `shape`, or raise DamagedError."""
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"can't be understood: {error}") from error


def parse(text: str, shape: type[T], *, where: str) -> T:
    """Return the YAML `text` as a `shape`, or raise ConfigError; `where` names its origin in messages."""
    document = plain.read(text, where=where)
    try:
        return msgspec.convert(document.content if document.content is not None else {}, shape)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        path = (match["path"] if match else None) or "$"
        message = match["message"] if match else str(error)
        if unknown := _UNKNOWN.match(message):
            known = ", ".join(_keys(msgspec.inspect.type_info(shape), path)) or "none"
            path, message = f"{path}.{unknown[1]}", f"no such key; expected one of: {known}"
        elif _BAD_ENUM.match(message):
            known = ", ".join(_members(msgspec.inspect.type_info(shape), path))
            message = f"{plain.told(message)}; expected one of: {known}"
        raise ConfigError(message, where=f"{where}:{document.line(path)}", path=plain.told(path)) from error


def _keys(shape: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the keys that `shape` has at `path`."""
    for found in _shapes(shape, path):
        if isinstance(found, msgspec.inspect.StructType):
            yield from (field.encode_name for field in found.fields)


def _members(shape: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the values that an enum of `shape` has at `path`."""
    for found in _shapes(shape, path):
        if isinstance(found, msgspec.inspect.EnumType):
            yield from (str(member.value) for member in found.cls)


def _shapes(shape: msgspec.inspect.Type, path: str) -> Iterator[msgspec.inspect.Type]:
    """Yield what `shape` says that may stand at `path`."""
    shapes = [shape]
    for name, _index in plain.STEP.findall(path):
        shapes = [inner for outer in shapes for inner in _inner(outer, name)]
    for found in shapes:
        yield from (*_inner_union(found), found)


def _inner_union(shape: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return shape.types if isinstance(shape, msgspec.inspect.UnionType) else ()


def _inner(shape: msgspec.inspect.Type, name: str) -> Iterator[msgspec.inspect.Type]:
    match shape:
        case msgspec.inspect.UnionType():
            for one in shape.types:
                yield from _inner(one, name)
        case msgspec.inspect.StructType():
            yield from (field.type for field in shape.fields if field.encode_name == name)
        case msgspec.inspect.DictType():
            yield shape.value_type
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield shape.item_type
        case _:
            pass

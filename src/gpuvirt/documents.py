"""Documents read into typed records: YAML that people write, JSON that programs write.

What is wrong in a person's file is told with file, line and `$.path`.
A file holds at most 1 MiB, and `plain` says how much of what. `null_is_absent` is for what Go programs write (`nulls`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import msgspec.inspect

from gpuvirt import nulls, plain
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.plain import Plain, Step

T = TypeVar("T")

MOST_BYTES = 1 << 20

_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_BAD_ENUM = re.compile(r"^Invalid enum value ")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]+)`)?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Written(Generic[T]):
    """What a document says, and where in it what stands, for those who find fault with it later."""

    value: T
    where: str
    document: plain.Document

    def place(self, steps: Sequence[Step]) -> str:
        """Return the origin and line of what the steps lead to: `config.yaml:7`."""
        return f"{self.where}:{self.document.line(steps)}"

    def fault(self, message: str, steps: Sequence[Step]) -> ConfigError:
        """Return the error that says what is wrong there."""
        return ConfigError(message, where=self.place(steps), path=plain.told(plain.path_of(steps)))


def load(path: Path, shape: type[T], *, null_is_absent: bool = False) -> T:
    """Return the document in the file `path` as a `shape`, or raise ConfigError. An empty file is an empty mapping."""
    return parse(text_of(path), shape, where=str(path), null_is_absent=null_is_absent)


def text_of(path: Path) -> str:
    """Return the text of the file `path`, or raise ConfigError."""
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
    """Return JSON as a `shape`, or raise DamagedError."""
    try:
        return nulls.decode(content, shape) if null_is_absent else msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"can't be understood: {error}") from error


def parse(text: str, shape: type[T], *, where: str, null_is_absent: bool = False) -> T:
    """Return the YAML `text` as a `shape`, or raise ConfigError; `where` names its origin in messages."""
    return parse_written(text, shape, where=where, null_is_absent=null_is_absent).value


def parse_written(text: str, shape: type[T], *, where: str, null_is_absent: bool = False) -> Written[T]:
    """Return the YAML `text` as a `shape` with its places, or raise ConfigError; `where` names its origin."""
    document = plain.read(text, where=where)
    content: Plain = document.content if document.content is not None else {}
    content = nulls.removed(content, shape) if null_is_absent else content
    try:
        return Written(msgspec.convert(content, shape), where, document)
    except msgspec.ValidationError as error:
        message, steps = _fault(error, content, shape)
        place = f"{where}:{document.line(steps)}"
        raise ConfigError(message, where=place, path=plain.told(plain.path_of(steps))) from error


def shaped(content: Plain, shape: type[T], *, where: str) -> T:
    """Return what the API server has stored for a person, as a `shape`, or raise ConfigError.

    `where` names its origin. Null stands for an absent field.
    """
    content = nulls.removed(content, shape)
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        message, steps = _fault(error, content, shape)
        raise ConfigError(message, where=where, path=plain.told(plain.path_of(steps))) from error


def _fault(error: msgspec.ValidationError, content: Plain, shape: type[T]) -> tuple[str, Sequence[Step]]:
    """Return what is wrong with content, as people say it, and the steps that lead there."""
    message, path = _told(error)
    steps = _steps(content, shape, message, path)
    if unknown := _UNKNOWN.match(message):
        known = ", ".join(_keys(msgspec.inspect.type_info(shape), path)) or "none"
        return f"no such key; expected one of: {known}", [*steps, unknown[1]]
    if _BAD_ENUM.match(message):
        known = ", ".join(_members(msgspec.inspect.type_info(shape), path))
        return f"{plain.told(message)}; expected one of: {known}", steps
    return message, steps


def _told(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return what msgspec says, and where, as it writes paths."""
    match = _AT.match(str(error))
    return (match["message"], match["path"] or "$") if match else (str(error), "$")


def _steps(content: Plain, shape: type[T], message: str, path: str) -> list[Step]:
    """Return msgspec's path to a fault with the keys of mappings, which it leaves out (`[...]`)."""
    steps: list[Step] = []
    for name, index in plain.STEP.findall(path):
        if index != "...":
            steps.append(int(index) if index else name)
            continue
        inner = _at(content, steps)
        keys = inner if isinstance(inner, dict) else ()
        key = next((key for key in keys if _fails(_with_only(content, steps, key), shape, message, path)), None)
        if key is None:
            break
        steps.append(key)
        content = _with_only(content, steps[:-1], key)
    return steps


def _fails(content: Plain, shape: type[T], message: str, path: str) -> bool:
    """Return whether a document has that very fault."""
    try:
        msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        return _told(error) == (message, path)
    return False


def _at(content: Plain, steps: Sequence[Step]) -> Plain:
    for step in steps:
        if isinstance(content, dict) and isinstance(step, str):
            content = content.get(step)
        elif isinstance(content, list) and isinstance(step, int):
            content = content[step]
    return content


def _with_only(content: Plain, steps: Sequence[Step], key: str) -> Plain:
    """Return a document with a single key left in the mapping that the steps lead to."""
    if not steps:
        return {key: content[key]} if isinstance(content, dict) else content
    step = steps[0]
    if isinstance(content, dict) and isinstance(step, str):
        return {**content, step: _with_only(content[step], steps[1:], key)}
    if isinstance(content, list) and isinstance(step, int):
        return [_with_only(one, steps[1:], key) if index == step else one for index, one in enumerate(content)]
    return content


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
        yield from _alternatives(found)


def _alternatives(shape: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yield the types of which a value may be, without what is said of them."""
    match shape:
        case msgspec.inspect.Metadata():
            yield from _alternatives(shape.type)
        case msgspec.inspect.UnionType():
            for one in shape.types:
                yield from _alternatives(one)
        case _:
            yield shape


def _inner(shape: msgspec.inspect.Type, name: str) -> Iterator[msgspec.inspect.Type]:
    match shape:
        case msgspec.inspect.UnionType() | msgspec.inspect.Metadata():
            for one in _alternatives(shape):
                yield from _inner(one, name)
        case msgspec.inspect.StructType():
            yield from (field.type for field in shape.fields if field.encode_name == name)
        case msgspec.inspect.DictType():
            yield shape.value_type
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield shape.item_type
        case _:
            pass

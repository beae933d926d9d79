"""Documents read into typed records: YAML that people write, JSON that programs write.

What is wrong in a person's file is told with file, line and `$.path`.

In YAML, scalars follow the core schema of YAML 1.2. Under the older rules a PCI address (`0000:04:00.0`) is a number
of seconds, a class (`030200`) is octal, and a name like `on` is true.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import msgspec.inspect
import yaml

from gpuvirt.errors import ConfigError, DamagedError

T = TypeVar("T")

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What a YAML document holds once it is read."""

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`$")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]+)`)?$", re.DOTALL)


class _Loader(yaml.CSafeLoader):
    """Safe YAML with the scalars of the 1.2 core schema."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)$"),
    list("-+0123456789"),
)


def load(path: Path, shape: type[T]) -> T:
    """Return the document in the file `path` as a `shape`, or raise ConfigError. An empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", where=str(path)) from error
    return parse(text, shape, where=str(path))


def from_json(content: bytes, shape: type[T]) -> T:
    """Return JSON as a `shape`, or raise DamagedError."""
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"can't be understood: {error}") from error


def parse(text: str, shape: type[T], *, where: str) -> T:
    """Return the YAML `text` as a `shape`, or raise ConfigError; `where` names its origin in messages."""
    root = _compose(text, where)
    content = _plain(root, where) if root is not None else {}
    try:
        return msgspec.convert(content if content is not None else {}, shape)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        path = (match["path"] if match else None) or "$"
        message = match["message"] if match else str(error)
        if unknown := _UNKNOWN.match(message):
            known = ", ".join(_keys(msgspec.inspect.type_info(shape), path)) or "none"
            path, message = f"{path}.{unknown[1]}", f"no such key; expected one of: {known}"
        raise ConfigError(message, where=f"{where}:{_line(root, path)}", path=path) from error


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"not YAML: {error.problem}", where=f"{where}:{line}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", where=where) from error


def _plain(root: yaml.Node, where: str) -> Plain:
    for message, path, node in _faults(root, "$", ()):
        raise ConfigError(message, where=f"{where}:{node.start_mark.line + 1}", path=path)
    loader = _Loader("")
    try:
        content: Plain = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"not YAML: {error.problem}", where=f"{where}:{line}") from error
    finally:
        loader.dispose()
    return content


def _faults(node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield what YAML allows and a document of ours may not have: a key given twice, an alias inside its own anchor."""
    if node in above:
        yield "this alias stands inside what it refers to", path, node
        return
    within = (*above, node)
    match node:
        case yaml.MappingNode():
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    yield "this key stands twice", f"{path}.{name}", key
                seen.add(name)
                yield from _faults(value, f"{path}.{name}", within)
        case yaml.SequenceNode():
            for index, item in enumerate(node.value):
                yield from _faults(item, f"{path}[{index}]", within)
        case _:
            pass


def _line(root: yaml.Node | None, path: str) -> int:
    """Return the line of the deepest node on `path`; msgspec writes `[...]` for the keys and values of a mapping."""
    node, line = root, 1
    for name, index in _STEP.findall(path):
        if isinstance(node, yaml.MappingNode):
            children: Mapping[str, yaml.Node] = {str(key.value): value for key, value in node.value}
            node = children.get(name)
        elif isinstance(node, yaml.SequenceNode) and index.isdigit() and int(index) < len(node.value):
            node = node.value[int(index)]
        else:
            break
        if node is None:
            break
        line = node.start_mark.line + 1
    if line == 1 and root is not None:
        line = root.start_mark.line + 1
    return line


def _keys(shape: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the keys that `shape` has at `path`."""
    shapes = [shape]
    for name, _index in _STEP.findall(path):
        shapes = [inner for outer in shapes for inner in _inner(outer, name)]
    for found in shapes:
        for struct in (*_inner_union(found), found):
            if isinstance(struct, msgspec.inspect.StructType):
                yield from (field.encode_name for field in struct.fields)


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

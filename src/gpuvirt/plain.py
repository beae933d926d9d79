"""YAML read into plain values, and written: texts, numbers, lists, mappings; refused where ours may not have it.

In YAML, scalars follow the core schema of YAML 1.2. Under the older rules a PCI address (`0000:04:00.0`) is a number
of seconds, a class (`030200`) is octal, and a name like `on` is true. Keys are texts, and tags beyond the core schema's
are refused.

A document holds at most 40 levels, and 100,000 values with every alias written out: a machine of 4,000 cards is a third
of that, and a few lines of aliases would otherwise be more than any memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml
from typing_extensions import override

from gpuvirt.errors import ConfigError

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What a YAML document holds once it is read."""

MOST_LEVELS = 40
MOST_VALUES = 100_000
MOST_TOLD = 300
"""Characters of a message or path; what somebody put into a file may be longer."""

STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
"""A step of a path as msgspec writes it: `.name`, `[0]`, or `[...]` for any key or value of a mapping."""

Step = str | int
"""A step into a document: the key of a mapping, whatever characters it has, or the index of a list."""

_CORE = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP = (
    f"{_CORE}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)
_INT_PATTERN = r"[-+]?(?:0|[1-9][0-9]{0,99})|0x[0-9a-fA-F]{1,99}"


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A kind of scalar of the core schema."""

    called: str
    pattern: re.Pattern[str]
    begins: str
    """The characters that one may begin with; PyYAML asks for them."""
    read: Callable[[str], Plain]


_SCALARS: Mapping[str, _Scalar] = {
    _NULL: _Scalar("nothing", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN", lambda _: None),
    _BOOL: _Scalar(
        "true or false", re.compile(r"^(?:true|false)$", re.IGNORECASE), "tTfF", lambda text: text.lower() == "true"
    ),
    _INT: _Scalar(
        "a whole number", re.compile(f"^(?:{_INT_PATTERN})$"), "-+0123456789", lambda text: int(text, _base(text))
    ),
    _FLOAT: _Scalar(
        "a number",
        re.compile(r"^[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?$"),
        "-+0123456789",
        float,
    ),
}


def _base(text: str) -> int:
    return 16 if text.startswith("0x") else 10


class _Loader(yaml.CSafeLoader):
    """Safe YAML with the scalars of the 1.2 core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _scalar in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _scalar.pattern, [*_scalar.begins, *([""] if _tag == _NULL else [])])


class _Dumper(yaml.CSafeDumper):
    """Safe YAML with a text in quotes where it would be something else under YAML 1.1 or 1.2, and without aliases."""

    @override
    def ignore_aliases(self, data: object) -> bool:
        return True


for _tag, _scalar in _SCALARS.items():
    _Dumper.add_implicit_resolver(_tag, _scalar.pattern, [*_scalar.begins, *([""] if _tag == _NULL else [])])


def _lines(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_STR, text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)


def write(content: Plain) -> str:
    """Return `content` as YAML, the innermost lists and mappings on one line each where they fit, lines of texts so."""
    return yaml.dump(content, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=118, allow_unicode=True)


@dataclass(frozen=True, slots=True)
class Document:
    """What a text holds, and where in it what stands."""

    content: Plain
    _root: yaml.Node | None

    def line(self, steps: Sequence[Step]) -> int:
        """Return the line of the deepest node that the steps lead to."""
        return _line(self._root, steps)


def read(text: str, *, where: str) -> Document:
    """Return the YAML `text`, or raise ConfigError; `where` names its origin in messages."""
    root = _compose(text, where)
    return Document(_Reading(where).read(root, "$").value if root is not None else None, root)


def told(text: str) -> str:
    """Return a text on one line, and not without end."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]}..."


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        _check_levels(text, where)
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"not YAML: {told(str(error.problem))}", where=f"{where}:{line}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {told(str(error))}", where=where) from error


def _check_levels(text: str, where: str) -> None:
    """Raise ConfigError where lists and mappings are nested too deep: composing calls itself for each level, in C."""
    level = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
            if level > MOST_LEVELS:
                line = event.start_mark.line + 1 if event.start_mark is not None else 1
                raise ConfigError(_TOO_DEEP, where=f"{where}:{line}")
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1


_TOO_DEEP = f"lists and mappings are nested too deep; expected at most {MOST_LEVELS} levels"


@dataclass(frozen=True, slots=True)
class _Read:
    """What a node stands for, and how much that is with every alias written out."""

    value: Plain
    values: int = 1
    levels: int = 0


class _Reading:
    """One document being read; each node once, however many aliases lead to it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._done: dict[int, _Read] = {}
        self._within: set[int] = set()

    def read(self, node: yaml.Node, path: str) -> _Read:
        """Return what a node stands for; raise ConfigError for what YAML allows and a document of ours may not have."""
        identity = id(node)
        if identity in self._within:
            raise self._fault("this alias stands inside what it refers to; write out what is meant", path, node)
        if identity not in self._done:
            self._within.add(identity)
            self._done[identity] = self._read_new(node, path)
            self._within.remove(identity)
        return self._done[identity]

    def _read_new(self, node: yaml.Node, path: str) -> _Read:
        match node:
            case yaml.MappingNode(tag=tag) if tag == _MAP:
                mapping = {name: self.read(value, f"{path}.{name}") for name, value in self._pairs(node, path)}
                value: Plain = {name: read.value for name, read in mapping.items()}
                return self._sum(node, path, value, list(mapping.values()))
            case yaml.SequenceNode(tag=tag) if tag == _SEQ:
                items = [self.read(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
                return self._sum(node, path, [read.value for read in items], items)
            case yaml.ScalarNode(tag=tag, value=text):
                return _Read(self._scalar(node, tag, text, path))
            case _:
                raise self._fault(f"the tag {_short(node.tag)} is not known here; leave it out", path, node)

    def _pairs(self, node: yaml.MappingNode, path: str) -> Iterator[tuple[str, yaml.Node]]:
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if not isinstance(key, yaml.ScalarNode):
                raise self._fault("a key must be a text, got a list or a mapping", path, key)
            if key.tag != _STR:
                kind = _SCALARS[key.tag].called if key.tag in _SCALARS else _short(key.tag)
                raise self._fault(
                    f"a key must be a text, got {kind}; put it in quotes: '{name}'", f"{path}.{name}", key
                )
            if name in seen:
                raise self._fault("this key stands twice", f"{path}.{name}", key)
            seen.add(name)
            yield name, value

    def _sum(self, node: yaml.Node, path: str, value: Plain, inner: list[_Read]) -> _Read:
        values = 1 + sum(read.values for read in inner)
        levels = 1 + max((read.levels for read in inner), default=0)
        if levels > MOST_LEVELS:
            raise self._fault(f"with its aliases written out, {_TOO_DEEP}", path, node)
        if values > MOST_VALUES:
            raise self._fault(
                f"with its aliases written out, this is more than {MOST_VALUES:,} values; leave some out", path, node
            )
        return _Read(value, values, levels)

    def _scalar(self, node: yaml.Node, tag: str, text: str, path: str) -> Plain:
        if tag == _STR:
            return text
        scalar = _SCALARS.get(tag)
        if scalar is None:
            raise self._fault(f"the tag {_short(tag)} is not known here; leave it out", path, node)
        if not scalar.pattern.fullmatch(text):
            raise self._fault(
                f"expected {scalar.called}, as the tag {_short(tag)} says, got {text!r}; mend it or leave the tag out",
                path,
                node,
            )
        return scalar.read(text)

    def _fault(self, message: str, path: str, node: yaml.Node) -> ConfigError:
        return ConfigError(told(message), where=f"{self._where}:{node.start_mark.line + 1}", path=told(path))


def _short(tag: str) -> str:
    """Return a tag as people write it."""
    return f"!!{tag.removeprefix(_CORE)}" if tag.startswith(_CORE) else tag


def path_of(steps: Sequence[Step]) -> str:
    """Return steps as people read them: `$.modes.a[0]`."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _line(root: yaml.Node | None, steps: Sequence[Step]) -> int:
    """Return the line of the deepest node that the steps lead to."""
    node = root
    line = root.start_mark.line + 1 if root is not None else 1
    for step in steps:
        if isinstance(node, yaml.MappingNode) and isinstance(step, str):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and 0 <= step < len(node.value):
            found = (node.value[step], node.value[step])
        else:
            break
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line

"""Reads and writes YAML by PyYAML; `plain` loads it with the first document, since most agents have none to read.

PyYAML reads YAML 1.1, in which a PCI address (`0000:04:00.0`) is a number of seconds, a class (`030200`) is octal, and
a name like `on` is true. Here, scalars follow the core schema of YAML 1.2. Keys must be strings, and tags beyond the
core schema are rejected. PyYAML accepts duplicate keys, which are rejected here. So are aliases: a few lines of them
expand to more values than fit into memory.

A document has at most 40 levels, and 100,000 keys and values: a host with 4,000 cards needs two thirds of that.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import yaml
from typing_extensions import override

MOST_LEVELS = 40
MOST_VALUES = 100_000

Step = str | int
"""A step into a document: the key of a mapping, whatever characters it has, or the index of a list."""

_CORE = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP = (
    f"{_CORE}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)
_INT_PATTERN = r"[-+]?(?:0|[1-9][0-9]{0,99})|0x[0-9a-fA-F]{1,99}"


class _Scalar(msgspec.Struct, frozen=True):
    """A type of scalar of the core schema."""

    called: str
    pattern: re.Pattern[str]
    begins: str
    """The possible first characters, which PyYAML requires."""
    read: Callable[[str], object]


_SCALARS: Mapping[str, _Scalar] = {
    _NULL: _Scalar("null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN", lambda _: None),
    _BOOL: _Scalar(
        "true or false", re.compile(r"^(?:true|false)$", re.IGNORECASE), "tTfF", lambda text: text.lower() == "true"
    ),
    _INT: _Scalar("a whole number", re.compile(f"^(?:{_INT_PATTERN})$"), "-+0123456789", lambda text: int(text, 0)),
    _FLOAT: _Scalar(
        "a number",
        re.compile(r"^[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?$"),
        "-+0123456789",
        float,
    ),
}


class _Loader(yaml.CSafeLoader):
    """Safe YAML with the scalars of the core schema of YAML 1.2."""


def _fault(message: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=message, problem_mark=mark)


def _unknown(_: _Loader, node: yaml.Node) -> object:
    raise _fault(f"the tag {_short(node.tag)} is not supported; remove it", node.start_mark)


def _scalar_of(loader: _Loader, node: yaml.ScalarNode) -> object:
    scalar, text = _SCALARS[node.tag], str(loader.construct_scalar(node))
    if not scalar.pattern.fullmatch(text):
        message = f"the tag {_short(node.tag)} requires {scalar.called}, found {text!r}"
        raise _fault(f"{message}; correct the value or remove the tag", node.start_mark)
    return scalar.read(text)


def _mapping(loader: _Loader, node: yaml.Node) -> object:
    if not isinstance(node, yaml.MappingNode):
        return _unknown(loader, node)
    names: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _fault("a key must be a string, found a list or a mapping", key.start_mark)
        if key.tag != _STR:
            kind = _SCALARS[key.tag].called if key.tag in _SCALARS else _short(key.tag)
            raise _fault(f"a key must be a string, found {kind}; put it in quotes: '{key.value}'", key.start_mark)
        if key.value in names:
            raise _fault("duplicate key", key.start_mark)
        names.add(key.value)
    return {str(name): value for name, value in loader.construct_mapping(node, deep=True).items()}


_Loader.yaml_constructors = {tag: yaml.CSafeLoader.yaml_constructors[tag] for tag in (_STR, _SEQ)}
for _tag in _SCALARS:
    _Loader.add_constructor(_tag, _scalar_of)
_Loader.add_constructor(_MAP, _mapping)
_Loader.add_constructor(None, _unknown)


class _Dumper(yaml.CSafeDumper):
    """Safe YAML without aliases, with quotes around strings that YAML 1.1 or 1.2 would read as another type."""

    @override
    def ignore_aliases(self, data: object) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _tag, _scalar in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _scalar.pattern, [*_scalar.begins, *([""] if _tag == _NULL else [])])


def _lines(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_STR, text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)


def write(content: object) -> str:
    """Return `content` as YAML: innermost lists and mappings on one line where they fit, multi-line strings as
    blocks."""
    return yaml.dump(content, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=118, allow_unicode=True)


class YamlSyntaxError(ValueError):
    """Why a text is not YAML, or has what is rejected here."""

    def __init__(self, message: str, line: int | None, steps: Sequence[Step]) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        """None where the place is not known."""
        self.steps = steps
        """The steps to the deepest value at the place."""


class YamlContent(msgspec.Struct, frozen=True):
    """The content of a YAML text, and the lines of its values."""

    value: object
    _root: yaml.Node | None

    def line(self, steps: Sequence[Step]) -> int:
        """Return the line of the deepest existing node on the way that `steps` describe."""
        node = self._root
        line = node.start_mark.line + 1 if node is not None else 1
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


def read(text: str) -> YamlContent:
    """Return the content of a YAML text; raise YamlSyntaxError."""
    root: yaml.Node | None = None
    try:
        _check(text)
        root = yaml.compose(text, Loader=_Loader)
        return YamlContent(_Loader("").construct_document(root) if root is not None else None, root)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        is_ours = isinstance(error, yaml.constructor.ConstructorError)
        raise YamlSyntaxError(
            str(problem) if is_ours else f"not YAML: {problem}",
            mark.line + 1 if mark is not None else None,
            _steps_to(root, mark) if mark is not None else (),
        ) from error


def _check(text: str) -> None:
    """Refuse aliases and what is too large before a value is composed: that takes some 500 bytes for each value, and
    recurses in C for each level."""
    level, values = 0, 0
    for event in yaml.parse(text, Loader=_Loader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.AliasEvent):
            message = "an alias (`*NAME`) is not supported; write the value in its place"
        elif level > MOST_LEVELS:
            message = f"lists and mappings are nested too deep; expected at most {MOST_LEVELS} levels"
        elif values > MOST_VALUES:
            message = f"more than {MOST_VALUES:,} keys and values; remove some"
        else:
            continue
        line = event.start_mark.line if event.start_mark is not None else 0
        raise _fault(message, yaml.Mark("", 0, line, 0, None, 0))


def _short(tag: str) -> str:
    """Return a tag in its short form: `!!int`."""
    return f"!!{tag.removeprefix(_CORE)}" if tag.startswith(_CORE) else tag


def _steps_to(root: yaml.Node | None, mark: yaml.Mark) -> list[Step]:
    """Return the steps to the deepest node at a mark."""
    steps: list[Step] = []
    node = root
    while isinstance(node, yaml.CollectionNode):
        if isinstance(node, yaml.MappingNode):
            begun = [(key, value) for key, value in node.value if key.start_mark.index <= mark.index]
            steps += [str(key.value) for key, _ in begun[-1:] if isinstance(key, yaml.ScalarNode)]
            inner = [value for _, value in begun[-1:] if _is_at(value, mark)]
        else:
            found = [index for index, item in enumerate(node.value) if _is_at(item, mark)][-1:]
            steps += found
            inner = [node.value[index] for index in found]
        node = inner[0] if inner else None
    return steps


def _is_at(node: yaml.Node, mark: yaml.Mark) -> bool:
    return bool(node.start_mark.index <= mark.index <= node.end_mark.index)

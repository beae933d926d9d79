"""The table of a chart's values in Markdown, made of values.yaml and its comments."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import yaml


@dataclass(frozen=True, slots=True)
class Value:
    """One key, with the comment right above it."""

    key: str
    default: str
    text: str


def values(text: str) -> Iterator[Value]:
    """Yield the keys of a values file that have a comment or no keys below them, in order."""
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError("values.yaml is not a mapping")
    yield from _values(root, text.splitlines(), "")


def _values(node: yaml.MappingNode, lines: list[str], before: str) -> Iterator[Value]:
    for key, value in node.value:
        name = f"{before}{key.value}"
        comment = _above(lines, key.start_mark.line)
        nested = isinstance(value, yaml.MappingNode) and bool(value.value) and not value.flow_style
        below = list(_values(value, lines, f"{name}.")) if nested else []
        described = any(inner.text for inner in below)
        if comment or not below:
            yield Value(name, "" if nested else json.dumps(_plain(value)), comment)
        if described or not comment:
            yield from below
        else:
            yield from (inner for inner in below if inner.default not in {'""', "[]", "{}"})


def _above(lines: list[str], line: int) -> str:
    """Return the comment with the same indentation right above a line."""
    indent = len(lines[line]) - len(lines[line].lstrip())
    mark = " " * indent + "# "
    found: list[str] = []
    while line > 0 and lines[line - 1].startswith(mark):
        line -= 1
        found.insert(0, lines[line].removeprefix(mark))
    return " ".join(found)


def _plain(node: yaml.Node) -> object:
    loader = yaml.SafeLoader("")
    return loader.construct_object(node, deep=True)


def table(text: str) -> str:
    """Return the Markdown table of a values file."""
    rows = (f"| `{value.key}` | {_code(value.default)} | {value.text} |\n" for value in values(text))
    return "| key | default | |\n|---|---|---|\n" + "".join(rows)


def _code(default: str) -> str:
    return f"`{default}`" if default else ""

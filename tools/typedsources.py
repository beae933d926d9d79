"""Python files with the types that mypy infers for their expressions, for the checks that need them."""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from mypy import nodes
from mypy.build import BuildResult, BuildSource, build
from mypy.config_parser import parse_config_file
from mypy.options import Options
from mypy.types import Type, get_proper_type
from shipped import ROOT, SOURCES
from typing_extensions import override

_REFERENCES = frozenset({"node", "info", "analyzed", "type", "unanalyzed_type", "original_def", "definition"})
"""Attributes of mypy's nodes that lead out of the tree."""

Span = tuple[int, int, int | None, int | None]
"""The first line and column of an expression, and its last."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A place that breaks a rule."""

    path: str
    line: int
    what: str

    @override
    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class TypedSource:
    """One module."""

    path: str
    """Below the folder of the packages: `gpuvirt/agent/agent.py`."""
    module: str
    text: str
    tree: ast.Module
    types: Mapping[Span, Type]

    def type_of(self, value: ast.expr) -> Type | None:
        """Return the type of an expression, None where mypy has inferred none."""
        found = self.types.get((value.lineno, value.col_offset, value.end_lineno, value.end_col_offset))
        return get_proper_type(found) if found is not None else None

    def is_waived(self, line: int, waiver: str) -> bool:
        """Return whether a comment on a line, or on the line above alone, allows what stands there."""
        lines = ["", *self.text.splitlines()]
        return waiver in lines[line] or lines[line - 1].lstrip().startswith(waiver)


def typed_sources(paths: Collection[Path], roots: Sequence[Path]) -> tuple[list[TypedSource], list[str]]:
    """Return the modules below `roots`, and mypy's errors, since it does not know all types then."""
    modules = {path: next(path.relative_to(root) for root in roots if path.is_relative_to(root)) for path in paths}
    result = _typed(modules, roots)
    return [_source(path, result, below) for path, below in modules.items()], result.errors


def _typed(sources: Mapping[Path, Path], roots: Sequence[Path]) -> BuildResult:
    options, problems = Options(), StringIO()
    parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"), problems, problems)
    options.incremental = False  # modules from the cache have no trees
    options.cache_dir = "/dev/null"
    options.export_types = options.preserve_asts = True
    options.mypy_path = [*map(str, (*roots, *SOURCES)), str(ROOT / "tools" / "stubs")]
    return build([BuildSource(str(path), _module(below)) for path, below in sources.items()], options)


def _module(below: Path) -> str:
    return ".".join(below.with_suffix("").parts).removesuffix(".__init__")


def _source(path: Path, result: BuildResult, below: Path) -> TypedSource:
    module, text = _module(below), path.read_text()
    tree = result.graph[module].tree
    types: dict[Span, Type] = {}
    for expression in _expressions(tree.defs if tree is not None else ()):
        if (found := result.types.get(expression)) is not None:
            span = expression.line, expression.column, expression.end_line, expression.end_column
            types[span] = found
    return TypedSource(below.as_posix(), module, text, ast.parse(text), types)


def _expressions(tree: Sequence[nodes.Node]) -> Iterator[nodes.Expression]:
    """Yield the expressions of a tree. mypy's own visitors are compiled, and can't be subclassed here."""
    seen: set[nodes.Node] = set()
    waiting: list[object] = list(tree)
    while waiting:
        node = waiting.pop()
        if isinstance(node, list | tuple):
            waiting += node
        elif isinstance(node, nodes.Node) and node not in seen:
            seen.add(node)
            if isinstance(node, nodes.Expression):
                yield node
            names: tuple[str, ...] = vars(type(node))["__mypyc_attrs__"]
            waiting += (getattr(node, name, None) for name in names if name not in _REFERENCES)

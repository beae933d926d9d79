"""Forbids to take the truth of values that may be unknown: such a test takes unknown for absent, or for present.

A value may be unknown if its type, as mypy infers it, is a union with a subclass of `facts.notknown.NotKnown`:
`Unread`, `Unknown`. A decision asks by `isinstance` or `match`, after which mypy has narrowed the type. A line that has
to make a known value of unknown says why in a comment on it or above it, `# unknown: the device is refused`.
"""

import ast
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

from mypy import nodes
from mypy.build import BuildResult, BuildSource, build
from mypy.config_parser import parse_config_file
from mypy.options import Options
from mypy.types import Instance, Type, UnionType, flatten_nested_unions, get_proper_type
from typing_extensions import override

ROOT = Path(__file__).resolve().parent.parent
BASE = "gpuvirt.facts.notknown.NotKnown"
WAIVER = "# unknown: "

DECIDING = tuple(
    f"gpuvirt/{package}"
    for package in (
        *("cli/changes", "kubelet", "hardware/usage", "hardware/functions", "hardware/devicefacts.py"),
        *("model/allocation", "model/change", "model/node", "model/offers"),
        *("node/allocation", "node/change", "node/known", "node/reconcile", "node/shares"),
    )
)
"""Where rule 1 is decided. There, `is False`, `== ()` and `() if isinstance(x, Unread)` need a reason, too. Elsewhere
they may show what is known; a truth test is a fault everywhere, since it raises TypeError."""

_REFERENCES = frozenset({"node", "info", "analyzed", "type", "unanalyzed_type", "original_def", "definition"})
"""Attributes of mypy's nodes that lead out of the tree."""
_EMPTY_CALLS = frozenset({"frozenset", "set", "dict", "list", "tuple", "bool", "str", "int"})

Span = tuple[int, int, int | None, int | None]
"""The first line and column of an expression, and its last."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A place that takes the truth of a value that may be unknown."""

    path: str
    line: int
    what: str

    @override
    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class _Finder(ast.NodeVisitor):
    """Finds the faults of one module, by the types of its expressions."""

    def __init__(self, types: Mapping[Span, Type], *, decides: bool) -> None:
        self.faults: set[tuple[int, str]] = set()
        self._types, self._decides = types, decides

    @override
    def visit(self, node: ast.AST) -> None:
        """Judge a node and all nodes below it."""
        match node:
            case ast.If() | ast.While() | ast.Assert() | ast.IfExp():
                self._test(node.test)
            case ast.match_case(guard=ast.expr() as guard):
                self._test(guard)
            case ast.comprehension():
                for condition in node.ifs:
                    self._test(condition)
            case ast.UnaryOp(op=ast.Not()):
                self._test(node.operand)
            case ast.BoolOp():
                for value in node.values[:-1]:
                    self._test(value)
            case ast.Call():
                self._judge_call(node)
            case _:
                pass
        if self._decides:
            self._judge_decision(node)
        self.generic_visit(node)

    def _judge_decision(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                self._judge_comparison(node)
            case ast.IfExp():
                self._judge_choice(node)
            case ast.Call(ast.Attribute(mapping, "get" | "pop" as name), [_, default]) if _is_plain(default):
                if (unknown := self._unknown_value_of(mapping)) != "":
                    self._add(node, f"the default of `{name}` of a mapping whose values may be {unknown}")
            case _:
                pass

    def _test(self, value: ast.expr, how: str = "a truth test") -> None:
        if isinstance(value, ast.BoolOp):
            self._test(value.values[-1], how)
        elif name := _unknown_in(self._type(value)):
            self._add(value, f"{how} of a value that may be {name}")

    def _judge_call(self, call: ast.Call) -> None:
        match call.func, call.args:
            case ast.Name("bool"), [value]:
                self._test(value, "`bool`")
            case ast.Name("any" | "all" as name), [values]:
                for item in _items(values):
                    self._test(item, f"`{name}`")
            case _:
                pass

    def _judge_comparison(self, comparison: ast.Compare) -> None:
        values = [comparison.left, *comparison.comparators]
        for left, right in pairwise(values):
            for value, other in ((left, right), (right, left)):
                if _is_plain(other):
                    self._test(value, f"a comparison with `{ast.unparse(other)}`")

    def _judge_choice(self, choice: ast.IfExp) -> None:
        """Add a fault for `() if isinstance(found, Unread) else found`, which makes a known value of unknown."""
        test, value = choice.test, choice.body
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, value = test.operand, choice.orelse
        match test:
            case ast.Call(ast.Name("isinstance"), [tested, _]) if _is_plain(value):
                if (name := _unknown_in(self._type(tested))) != "":
                    self._add(choice, f"`{ast.unparse(value)}` stands for a value that may be {name}")
            case _:
                pass

    def _unknown_value_of(self, mapping: ast.expr) -> str:
        match self._type(mapping):
            case Instance(args=(_, value)):
                return _unknown_in(get_proper_type(value))
            case _:
                return ""

    def _type(self, value: ast.expr) -> Type | None:
        found = self._types.get((value.lineno, value.col_offset, value.end_lineno, value.end_col_offset))
        return get_proper_type(found) if found is not None else None

    def _add(self, where: ast.expr, what: str) -> None:
        self.faults.add((where.lineno, what))


def _items(values: ast.expr) -> list[ast.expr]:
    match values:
        case ast.GeneratorExp(item) | ast.ListComp(item) | ast.SetComp(item):
            return [item]
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return items
        case _:
            return []


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression is a value without content, or a truth value: `()`, `frozenset()`, `False`, `0`."""
    match value:
        case ast.Constant(constant):
            return constant is not None and (isinstance(constant, bool) or not constant)
        case ast.Tuple([]) | ast.List([]) | ast.Dict([]):
            return True
        case ast.Call(ast.Name(name) | ast.Subscript(ast.Name(name)), [], []):
            return name in _EMPTY_CALLS
        case _:
            return False


def _unknown_in(found: Type | None) -> str:
    """Return the name of the class that stands for unknown in a type; empty where there is none."""
    items = flatten_nested_unions(found.items) if isinstance(found, UnionType) else [found] if found else []
    classes = (item.type for one in items if isinstance(item := get_proper_type(one), Instance))
    return next((info.name for info in classes if any(base.fullname == BASE for base in info.mro)), "")


def find_faults(sources: Collection[Path], root: Path, deciding: tuple[str, ...]) -> tuple[list[Fault], list[str]]:
    """Return the faults of Python files below `root`, and mypy's errors, since it does not know all types then."""
    result = _typed(sources, root)
    return sorted(fault for path in sources for fault in _faults_of(path, result, root, deciding)), result.errors


def _typed(sources: Collection[Path], root: Path) -> BuildResult:
    options, problems = Options(), StringIO()
    parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"), problems, problems)
    options.incremental = False  # modules from the cache have no trees
    options.cache_dir = "/dev/null"
    options.export_types = options.preserve_asts = True
    options.mypy_path = [str(root), str(ROOT / "src")]
    return build([BuildSource(str(path), _module(path, root)) for path in sources], options)


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _faults_of(path: Path, result: BuildResult, root: Path, deciding: tuple[str, ...]) -> Iterator[Fault]:
    tree, text = result.graph[_module(path, root)].tree, path.read_text()
    types: dict[Span, Type] = {}
    for expression in _expressions(tree.defs if tree is not None else ()):
        if (found := result.types.get(expression)) is not None:
            span = expression.line, expression.column, expression.end_line, expression.end_column
            types[span] = found
    decides = path.relative_to(root).as_posix().startswith(deciding)
    finder, lines = _Finder(types, decides=decides), ["", *text.splitlines()]
    finder.visit(ast.parse(text))
    for line, what in finder.faults:
        if WAIVER not in lines[line] and not lines[line - 1].lstrip().startswith(WAIVER):
            yield Fault(str(path.relative_to(root)), line, what)


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


def main() -> int:
    """Check the package, or all Python files below another folder."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT / "src", help="the folder of the packages")
    parser.add_argument("--deciding", nargs="*", default=DECIDING, help="the paths below it where rule 1 is decided")
    asked = parser.parse_args()
    # What protoc generates has stubs beside it.
    sources = sorted(path for path in asked.root.rglob("*.py") if not path.with_suffix(".pyi").exists())
    faults, errors = find_faults(sources, asked.root, tuple(asked.deciding))
    for line in (*errors, *faults):
        print(line)
    return 1 if faults or errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Forbids to take the truth of values that may be unknown: such a test takes unknown for absent, or for present.

A value may be unknown if its type, as mypy infers it, is a union with a subclass of `facts.notknown.NotKnown`:
`Unread`, `Unknown`. A decision asks by `isinstance` or `match`, after which mypy has narrowed the type. A line that has
to make a known value of unknown says why in a comment on it or above it, `# unknown: the device is refused`.

`NotKnown.__bool__` shows a fault only when the line runs, and mypy does not flag `users or ()` on a union, since it
takes NoReturn as "never true" of that member alone. The cost: 10 to 20 s of processor time, since modules from mypy's
cache have no trees, and a dependence on mypy's internals, which constraints.txt pins. A None that stands for unknown is
not found; such facts become `Unread` when their code is changed.
"""

import ast
from collections.abc import Iterator
from itertools import pairwise

from mypy.types import Instance, Type, UnionType, flatten_nested_unions, get_proper_type
from typedsources import Fault, TypedSource
from typing_extensions import override

BASE = "gpuvirt.facts.notknown.NotKnown"
WAIVER = "# unknown: "

DECIDING = tuple(
    f"gpuvirt/{package}"
    for package in (
        *("cli/changes", "agent/kubelet", "hardware/access", "hardware/usage", "hardware/functions", "hardware/vgpu"),
        "hardware/devicefacts.py",
        *("model/allocation", "model/change", "model/node", "model/offers"),
        *("agent/allocation", "agent/change", "agent/known", "agent/ondemand"),
        *("agent/reconcile", "agent/shares", "agent/store"),
    )
)
"""Where rule 1 is decided. There, `is False`, `== ()` and `() if isinstance(x, Unread)` need a reason, too. Elsewhere
they may show what is known; a truth test is a fault everywhere, since it raises TypeError."""

_EMPTY_CALLS = frozenset({"frozenset", "set", "dict", "list", "tuple", "bool", "str", "int"})


class _Finder(ast.NodeVisitor):
    """Finds the faults of one module, by the types of its expressions."""

    def __init__(self, source: TypedSource, *, decides: bool) -> None:
        self.faults: set[tuple[int, str]] = set()
        self._source, self._decides = source, decides

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
        elif name := _unknown_in(self._source.type_of(value)):
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
                if (name := _unknown_in(self._source.type_of(tested))) != "":
                    self._add(choice, f"`{ast.unparse(value)}` stands for a value that may be {name}")
            case _:
                pass

    def _unknown_value_of(self, mapping: ast.expr) -> str:
        match self._source.type_of(mapping):
            case Instance(args=(_, value)):
                return _unknown_in(get_proper_type(value))
            case _:
                return ""

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
    classes = (item.type for part in items if isinstance(item := get_proper_type(part), Instance))
    return next((info.name for info in classes if any(base.fullname == BASE for base in info.mro)), "")


def find_faults(source: TypedSource, deciding: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the faults of one module."""
    finder = _Finder(source, decides=source.path.startswith(deciding))
    finder.visit(source.tree)
    for line, what in finder.faults:
        if not source.is_waived(line, WAIVER):
            yield Fault(source.path, line, what)

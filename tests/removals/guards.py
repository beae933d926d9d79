"""Finds the guards of the shipped code in its syntax trees, and makes the trees without one of them.

A guard is a statement that refuses: `raise`, `yield` of a reason, `return` of a reason or of an unknown value, a call
of a function that raises (`verify_idle(...)`), and a value that is read a second time. Where a guard has a condition of
several parts, each part is removed by itself, too.

In the modules of `CLOSELY` these are removed as well:

- a filter: the `if` of a comprehension, and an `if` whose last statement is `continue`;
- the answer of an `except`: it returns what looks like success instead, by the function's annotation (`()` for a
  tuple, the other answer for a bool), and of `ABSENT if ... else Unread(...)` always the first;
- a record that is written, such as `save(...)` or `await self._write(...)`;
- a limit: a number of the module, named as seconds (`NEW_S`) or as a count (`MISSES_TO_END`), that it compares or adds.
  It becomes 0, and 1,000 times as much. A number that is only passed on, such as a timeout, changes no decision, and
  would make tests wait. All modules get the new number, tests too, as if the source had it; only values that were
  derived from it at import stay, such as the parameters of tests.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec.structs import replace

import gpuvirt

ROOT = Path(gpuvirt.__file__).parent
TARGETS = (
    "agent/change",
    "agent/allocation",
    "agent/allocators.py",
    "agent/known",
    "agent/store",
    "agent/reconcile",
    "model/change",
    "model/node",
    "model/workers",
    "hardware/access",
    "hardware/usage",
    "hardware/vgpu",
    "agent/kubelet",
    "cli/changes",
    "cli/podaccount.py",
    "cli/dropin",
    "cli/support/files.py",
    "model/allocation",
    "model/offers",
    "agent/shares",
    "agent/ondemand",
    "agent/claims",
    "gpuvirt_schedules/commands/schedule.py",
    "gpuvirt_schedules/decide",
    "gpuvirt_schedules/controller",
    "gpuvirt_schedules/hypervisors",
)
"""The folders and modules whose guards are removed, those with the worst harm first."""

OWN_PROCESSES = frozenset({"gpuvirt.hardware.access.cdevkeeper", "gpuvirt.hardware.access.writer"})
"""The modules that run only in processes of their own, from their files: a removal in memory is not in these."""

CHILD_RINGS = ("libvirt", "vsphere")
"""The rings (`tests.rings`) whose tests start children of hypervisors' connections."""

CLOSELY = (
    "hardware/access",
    "hardware/usage",
    "hardware/vgpu",
    "agent/kubelet",
    "agent/known",
    "agent/store",
    "agent/reconcile",
    "agent/change",
    "agent/allocation",
    "cli/changes",
    "cli/podaccount.py",
    "cli/support/files.py",
    "gpuvirt_schedules/commands/schedule.py",
)
"""The folders in which filters, answers of handlers, records and limits are removed, too."""

MOST_CHARACTERS = 96
"""The characters of a statement that a key has."""
_VERIFIES = re.compile(r"(_?(ask|check|claim|demand|ensure|expect|refuse|require|verify)(_|\Z))|(\w+_)?walked\Z")
"""The names of functions that are called only because they may raise."""
_UNKNOWN = re.compile(r"\b(Unread|Unknown)\b")
_EMPTY = ("None", "()", "[]", "{}", "False")
_RECORDS = re.compile(r"_?(keep|note|record|remember|save|store|write)(_|\Z)")
_LIMIT = re.compile(r"_?(MISSES_|[A-Z_]+_S\Z)")
_SUCCESSES = {
    "AbstractSet[": "frozenset()",
    "Mapping[": "{}",
    "Sequence[": "()",
    "bytes": "b''",
    "dict[": "{}",
    "frozenset[": "frozenset()",
    "int": "0",
    "list[": "[]",
    "str": "''",
    "tuple[": "()",
}
"""The results of a function that has found nothing, by the begin of its annotation."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a syntax tree where a guard, or a part of its condition, can be removed."""

    outermost: str
    """The qualified name of the function, or of the outermost function around it: its code is replaced. Empty for a
    limit."""
    line: int
    """The first line of that outermost function, with its decorators."""
    function: str
    text: str
    """The statement, or the removed part of its condition."""
    remove: Callable[[], None]
    """Removes it from the tree."""
    mark: Callable[[int], None]
    """Makes the tree call `__reached__` with a number whenever it is executed."""
    limit: tuple[str, float] | None = None
    """The name of a limit with its other number."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A guard that can be removed."""

    key: str
    """Module, function and statement: stable as long as none of these changes."""
    module: str
    number: int
    """The number of the site in its module."""
    line: int


def modules() -> list[str]:
    """Return the names of all modules whose guards are removed."""
    found: list[str] = []
    for target in TARGETS:
        name, source = name_of(target), source_of(name_of(target))
        if source.name != "__init__.py":
            found.append(name)
            continue
        below = (path.relative_to(source.parent).with_suffix("") for path in sorted(source.parent.rglob("*.py")))
        found += [".".join((name, *path.parts)) for path in below if path.name != "__init__"]
    return [name for name in found if name not in OWN_PROCESSES]


def name_of(target: str) -> str:
    """Return the name of the package or module that a target is, or the begin of a key."""
    name = target.removesuffix(".py").replace("/", ".")
    return name if name.startswith("gpuvirt_schedules.") else f"gpuvirt.{name}"


def runs_in_child(module: str) -> bool:
    """Return whether the child of a hypervisor's connection may run a module (`tests.removals.inchild`)."""
    return module.startswith("gpuvirt_schedules.hypervisors.")


def ring_of(module: str) -> str | None:
    """Return the ring of tests whose library a module loads, which need not be installed; None for most modules."""
    return next((ring for ring in CHILD_RINGS if module.startswith(f"gpuvirt_schedules.hypervisors.{ring}.")), None)


def source_of(module: str) -> Path:
    """Return the file of a module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def removals() -> dict[str, Removal]:
    """Return all removals by key, in the order of the modules."""
    found: dict[str, Removal] = {}
    for module in modules():
        found |= {each.key: each for each in removals_of(module, source_of(module).read_text())}
    return found


def removals_of(module: str, source: str) -> Iterator[Removal]:
    """Yield the removals of one module. Equal statements of one function are numbered."""
    seen: Counter[str] = Counter()
    for number, site in enumerate(sites(ast.parse(source), closely=_is_close(module))):
        key = f"{module.removeprefix('gpuvirt.')}: {site.function}: {_brief(site.text)}"
        seen[key] += 1
        yield Removal(f"{key} #{seen[key]}" if seen[key] > 1 else key, module, number, site.line)


def sites(tree: ast.Module, *, closely: bool = False) -> list[Site]:
    """Return all sites of a module, always in the same order."""
    return [*_Finder(closely=closely).of_block(tree.body), *(_limits(tree) if closely else ())]


def _is_close(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{name_of(target)}." for target in CLOSELY))


def _limits(tree: ast.Module) -> Iterator[Site]:
    """Yield the numbers of a module that its decisions use."""
    operands = (
        operand
        for each in ast.walk(tree)
        if isinstance(each, ast.Compare | ast.BinOp)
        for operand in ast.iter_child_nodes(each)
    )
    used = {operand.id for operand in operands if isinstance(operand, ast.Name)}
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(int() | float() as number)) | ast.AnnAssign(
                ast.Name(name), value=ast.Constant(int() | float() as number)
            ) if name in used and _LIMIT.match(name):
                for factor in (0, 1000):
                    other, text = number * factor, f"{name} = {number} [times {factor}]"
                    instead = partial(setattr, statement, "value", ast.Constant(other))
                    yield Site("", statement.lineno, "<module>", text, instead, lambda _: None, (name, other))
            case _:
                pass


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"


Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Finder(msgspec.Struct, frozen=True):
    """Walks through the statements of one function, class or module."""

    path: str = ""
    outermost: tuple[str, int] | None = None
    returns: str = ""
    """The annotation of what the function returns."""
    inner: bool = False
    """Whether the statements are inside another statement of the function."""
    assigned: frozenset[str] = frozenset()
    """The names that have a value before these statements."""
    handled: str = ""
    """The exception that these statements handle."""
    closely: bool = False
    """Whether the module is one of `CLOSELY`."""

    def of_block(self, block: list[ast.stmt]) -> Iterator[Site]:
        assigned = self.assigned
        for index, statement in enumerate(block):
            here = replace(self, assigned=assigned)
            yield from here.of_statement(block, index, statement)
            assigned |= _names(statement)

    def of_statement(self, block: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Site]:
        if isinstance(statement, ast.ClassDef):
            yield from _Finder(self._name(statement), self.outermost, closely=self.closely).of_block(statement.body)
            return
        if isinstance(statement, Function):
            yield from self._of_function(statement)
            return
        if self.outermost is not None:
            if isinstance(statement, ast.If) and any(self._without(each) is not None for each in statement.body):
                yield from self._of_condition(block, index, statement)
            if (instead := self._without(statement)) is not None:
                yield self._site(block, index, self._text(statement), partial(block.__setitem__, index, instead))
            if self.closely:
                yield from self._of_filters(block, index, statement)
                if (success := self._as_success(statement)) is not None:
                    text = f"{self._text(statement)} [as {ast.unparse(success)}]"
                    yield self._site(block, index, text, partial(block.__setitem__, index, success))
        for nested, handled in _blocks(statement):
            inner = replace(self, inner=self.outermost is not None, handled=handled or self.handled)
            yield from inner.of_block(nested)

    def _of_function(self, function: Function) -> Iterator[Site]:
        line = min((each.lineno for each in function.decorator_list), default=function.lineno)
        outermost = self.outermost or (self._name(function), line)
        returns = ast.unparse(function.returns) if function.returns is not None else ""
        arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
        path = self._name(function)
        assigned = frozenset(arguments)
        yield from _Finder(path, outermost, returns, assigned=assigned, closely=self.closely).of_block(function.body)

    def _of_condition(self, block: list[ast.stmt], index: int, statement: ast.If) -> Iterator[Site]:
        """Yield the parts of a guard's condition. A part that gives a name its value can't be removed."""
        if not isinstance(statement.test, ast.BoolOp):
            return
        word = "and" if isinstance(statement.test.op, ast.And) else "or"
        parts = statement.test.values
        for number, part in enumerate(parts):
            if any(isinstance(each, ast.NamedExpr) for each in ast.walk(part)):
                continue
            rest = [other for each, other in enumerate(parts) if each != number]
            test = rest[0] if len(rest) == 1 else ast.BoolOp(statement.test.op, rest)
            text = f"{ast.unparse(part)} [{word} in] if {ast.unparse(statement.test)}"
            yield self._site(block, index, text, partial(setattr, statement, "test", test))

    def _of_filters(self, block: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Site]:
        """Yield the filters of a loop and of the comprehensions in a statement."""
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue):
            text = f"continue [in] if {ast.unparse(statement.test)}"
            yield self._site(block, index, text, partial(statement.body.__setitem__, -1, _parsed("pass")))
            yield from self._of_condition(block, index, statement)
        own = (each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.expr | ast.withitem))
        inside = (each for expression in own for each in ast.walk(expression))
        for loop in (each for each in inside if isinstance(each, ast.comprehension)):
            for condition in loop.ifs:
                if not any(isinstance(each, ast.NamedExpr) for each in ast.walk(condition)):
                    text = f"if {ast.unparse(condition)} [in] {ast.unparse(loop).partition(' if ')[0].strip()}"
                    yield self._site(block, index, text, partial(loop.ifs.remove, condition))

    def _as_success(self, statement: ast.stmt) -> ast.stmt | None:
        """Return what looks like success in place of the answer of a handler; None if the statement is none."""
        value = statement.value if isinstance(statement, ast.Return) else None
        if not self.handled or not isinstance(statement, ast.Raise | ast.Return) or "Iterator" in self.returns:
            return None
        if isinstance(value, ast.IfExp) and _UNKNOWN.search(ast.unparse(value.orelse)):
            return ast.Return(value.body)
        if self.returns == "bool":
            return ast.Return(ast.Constant(not (isinstance(value, ast.Constant) and value.value)))
        found = (of for begin, of in _SUCCESSES.items() if self.returns.startswith(begin))
        success = "None" if self.returns.endswith("None") else next(found, None)
        return _parsed(f"return {success}") if success not in {None, ast.unparse(value or ast.Constant(None))} else None

    def _text(self, statement: ast.stmt) -> str:
        text = ast.unparse(statement)
        return f"raise [in] except {self.handled}" if text == "raise" else text

    def _site(self, block: list[ast.stmt], index: int, text: str, remove: Callable[[], None]) -> Site:
        assert self.outermost is not None
        name, line = self.outermost
        return Site(name, line, self.path, text, remove, partial(_mark, block, index))

    def _without(self, statement: ast.stmt) -> ast.stmt | None:
        """Return what a guard is replaced by; None if the statement is no guard."""
        match statement:
            case ast.Raise():
                return _parsed("pass")
            case ast.Expr(ast.Yield() | ast.YieldFrom()) if "Reason" in self.returns:
                return _parsed("() if True else (yield)")  # a generator, also an asynchronous one
            case ast.Expr(ast.Call(func)) if _VERIFIES.match(_last_name(func)):
                return _parsed("pass")
            case ast.Return(ast.expr() as value) if ast.unparse(value) not in _EMPTY:
                return self._without_return(ast.unparse(value))
            case ast.Expr(ast.Call(func) | ast.Await(ast.Call(func))) if self.closely and _RECORDS.match(
                _last_name(func)
            ):
                return _parsed("pass")
            case ast.Assign() if self._is_read_again(statement):
                return _parsed("pass")
            case _:
                return None

    def _without_return(self, value: str) -> ast.stmt | None:
        is_unknown = bool(_UNKNOWN.search(self.returns)) and (bool(_UNKNOWN.search(value)) or self.inner)
        if self.inner and ("Reason" in self.returns or is_unknown):
            return _parsed("pass")
        if self.inner or "Reason" not in self.returns or "Iterator" in self.returns:
            return None
        return _parsed("return ()" if self.returns.startswith(("tuple[", "Sequence[")) else "return None")

    def _is_read_again(self, statement: ast.Assign) -> bool:
        """Return whether a statement only gives new values to names that have one, by a call."""
        targets = [each for target in statement.targets for each in ast.walk(target)]
        if any(isinstance(each, ast.Attribute | ast.Subscript | ast.Starred) for each in targets):
            return False
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        value = list(ast.walk(statement.value))
        used = {each.id for each in value if isinstance(each, ast.Name)}
        return names <= self.assigned and not names & used and any(isinstance(each, ast.Call) for each in value)

    def _name(self, statement: ast.ClassDef | Function) -> str:
        inside = f"{self.path}.<locals>." if self.outermost is not None else f"{self.path}." if self.path else ""
        return f"{inside}{statement.name}"


def _parsed(text: str) -> ast.stmt:
    (statement,) = ast.parse(text).body
    return statement


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names(statement: ast.stmt) -> frozenset[str]:
    """Return the names to which a statement may give values."""
    stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return frozenset(each.id for each in stored)


def _blocks(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], str]]:
    """Yield the blocks of statements inside a statement, with the exception that a block handles."""
    match statement:
        case ast.Try():
            yield statement.body, ""
            for handler in statement.handlers:
                yield handler.body, ast.unparse(handler.type) if handler.type is not None else "BaseException"
            yield statement.orelse, ""
            yield statement.finalbody, ""
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            yield statement.body, ""
            yield statement.orelse, ""
        case ast.With() | ast.AsyncWith():
            yield statement.body, ""
        case ast.Match():
            yield from ((case.body, "") for case in statement.cases)
        case _:
            return


def _mark(block: list[ast.stmt], index: int, number: int) -> None:
    test = ast.Call(ast.Name("__reached__", ast.Load()), [ast.Constant(number)], [])
    block[index] = ast.If(test, [block[index]], [])


def without(removal: Removal) -> tuple[ast.Module, Site]:
    """Return the syntax tree of a module without a guard, and the site of the guard."""
    tree = ast.parse(source_of(removal.module).read_text())
    site = sites(tree, closely=_is_close(removal.module))[removal.number]
    site.remove()
    return ast.fix_missing_locations(tree), site


def marked(module: str) -> tuple[ast.Module, Sequence[Site]]:
    """Return the syntax tree of a module that reports each site that is executed, and its sites."""
    tree = ast.parse(source_of(module).read_text())
    found = sites(tree, closely=_is_close(module))
    for number, site in enumerate(found):
        site.mark(number)
    return ast.fix_missing_locations(tree), found

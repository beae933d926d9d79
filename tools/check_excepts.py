"""Forbids to answer an error with a known value where rule 1 is decided: it takes what could not be read for absent.

A handler raises, or answers with a report of the failure: `Unread` or another `NotKnown`, an error, a `Reason`, or
something made of one of them. The kernel's errors for what does not exist (`ABSENT`) are an answer. Any other
handler says in a comment why its value does no harm, `# unknown: the step is refused`, on the line of its value or of
its `except`, or above.
"""

import ast
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import check_unknown
from mypy.types import Instance, Type, UnionType, flatten_nested_unions, get_proper_type
from typedsources import Fault, TypedSource

REPORTING = frozenset({check_unknown.BASE, "builtins.BaseException", "gpuvirt.model.reasons.reason.Reason"})
"""The classes that report a failure."""
ABSENCE = frozenset({"ABSENT", "ENDED", "GONE", "_GONE"})
"""Names of the sets of errors by which the kernel says that a file, a device or a process does not exist."""
PLAIN = frozenset({"builtins.int"})
"""Classes of values that report nothing of the error that they are made of; a bool is one."""
PATHS = frozenset({"pathlib.Path"})
SILENT = frozenset({"exists", "glob", "is_dir", "is_file", "is_mount", "is_socket", "is_symlink", "rglob", "walk"})
"""Methods with such a handler within: most errors are False, or no files (all of them from Python 3.14 on)."""
LOGS = frozenset({"log", "logging"})

GOES_ON = "goes on as if nothing had failed"

Statements = Sequence[ast.stmt]


def find_faults(source: TypedSource, deciding: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the handlers of one module that answer with a known value."""
    if not source.path.startswith(deciding):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.ExceptHandler(body=body):
                faults = list(_faults_of(body, source))
            case ast.Call(ast.Name("suppress") | ast.Attribute(attr="suppress")):
                faults = [(node.lineno, f"`suppress` {GOES_ON}")]
            case ast.Call(ast.Attribute(path, name)) if name in SILENT and _has_class(source.type_of(path), PATHS):
                faults = [(node.lineno, f"`{name}` of a path takes errors for absence")]
            case _:
                continue
        for line, what in faults:
            if not any(source.is_waived(at, check_unknown.WAIVER) for at in (line, node.lineno)):
                yield Fault(source.path, line, what)


def _faults_of(body: Statements, source: TypedSource) -> Iterator[tuple[int, str]]:
    """Yield the ends of a handler that do not report the failure."""
    statements = list(_flat(body))
    is_reported = any(_reports(value, source) for statement in statements for value in _values_of(statement))
    for statement in statements:
        match statement:
            case ast.Return(ast.expr() as value) if not _reports(value, source):
                yield statement.lineno, f"`{ast.unparse(statement)}` answers an error with a known value"
            case ast.Return(None) | ast.Continue() | ast.Break() if not is_reported:
                yield statement.lineno, GOES_ON
            case _:
                pass
    if not is_reported and not _is_ended(body):
        yield body[0].lineno, GOES_ON


def _flat(body: Statements) -> Iterator[ast.stmt]:
    """Yield statements with those inside of them, but none for errors of what does not exist."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(test, then, otherwise):
                yield from _flat([] if _is_absence(test, ast.In) else then)
                yield from _flat([] if _is_absence(test, ast.NotIn) else otherwise)
            case ast.With(body=inner) | ast.For(body=inner) | ast.While(body=inner) | ast.Try(body=inner):
                yield from _flat(inner)
            case _:
                pass


def _is_ended(body: Statements) -> bool:
    match body:
        case [*_, ast.If(_, then, otherwise)]:
            return _is_ended(then) and _is_ended(otherwise)
        case [*_, last]:
            return isinstance(last, ast.Raise | ast.Return | ast.Continue | ast.Break)
        case _:
            return False


def _is_absence(test: ast.expr, operator: type[ast.cmpop]) -> bool:
    """Return whether a test asks for the errors of what does not exist: `error.errno in ABSENT`."""
    match test:
        case ast.Compare(ast.Attribute(attr="errno"), [found], [ast.Name(name) | ast.Attribute(attr=name)]):
            return isinstance(found, operator) and name in ABSENCE
        case _:
            return False


def _values_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what a statement sets, yields or passes on."""
    match statement:
        case ast.Assign(value=value) | ast.AugAssign(value=value) | ast.Expr(ast.Yield(ast.expr() as value)):
            yield value
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name)))) if name in LOGS:
            return
        case ast.Expr(ast.Call(_, arguments, keywords) | ast.Await(ast.Call(_, arguments, keywords))):
            yield from (*arguments, *(keyword.value for keyword in keywords))
        case _:
            return


def _reports(value: ast.expr, source: TypedSource) -> bool:
    """Return whether a value reports a failure, in each of its branches, or is made of something that does."""
    parts: list[ast.expr] = []
    match value:
        case ast.IfExp(test, then, otherwise):
            return (_is_absence(test, ast.In) or _reports(then, source)) and (
                _is_absence(test, ast.NotIn) or _reports(otherwise, source)
            )
        case ast.JoinedStr():
            names = (node for node in ast.walk(value) if isinstance(node, ast.Name))
            return any(_has_class(source.type_of(name), REPORTING) for name in names)
        case ast.Tuple(items) | ast.List(items) | ast.Dict(values=items):
            return any(_reports(item, source) for item in items)
        case ast.Call(_, arguments, keywords):
            parts = [*arguments, *(keyword.value for keyword in keywords)]
        case ast.Attribute(whole):
            parts = [whole]
        case _:
            pass
    found = source.type_of(value)
    if _has_class(found, REPORTING):
        return True
    return (
        _has_class(found, {"builtins.object"})
        and not _has_class(found, PLAIN)
        and any(_reports(part, source) for part in parts)
    )


def _has_class(found: Type | None, names: AbstractSet[str]) -> bool:
    """Return whether each part of a type is one of these classes, or derived from one."""
    items = flatten_nested_unions(found.items) if isinstance(found, UnionType) else [found] if found else []
    classes = [get_proper_type(item) for item in items]
    return bool(classes) and all(
        isinstance(item, Instance) and any(base.fullname in names for base in item.type.mro) for item in classes
    )

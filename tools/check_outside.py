"""Forbids to write attributes of objects from outside: only the module of a class knows what has to change together.

A method of the class says what happens, or a function returns the next value. The object's type, as mypy infers it,
tells its class; classes of libraries are set up as their authors mean it.
"""

import ast
from collections.abc import Iterator

from mypy.nodes import TypeInfo
from mypy.types import Instance, Type, UnionType, flatten_nested_unions, get_proper_type
from typedsources import Fault, TypedSource


def find_faults(source: TypedSource, packages: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the writes of attributes of classes that another module of `packages` defines."""
    for node in ast.walk(source.tree):
        for written in _written(node):
            owner = _owner_of(written, source.type_of(written.value))
            if owner is not None and owner.module_name != source.module and _is_in(owner, packages):
                what = f"`{ast.unparse(written)}` is written from outside {owner.module_name}.{owner.name}"
                yield Fault(source.path, written.lineno, what)


def _written(node: ast.AST) -> Iterator[ast.Attribute]:
    match node:
        case ast.Assign(targets) | ast.Delete(targets):
            for target in targets:
                yield from _attributes(target)
        case ast.AugAssign(target) | ast.AnnAssign(target) | ast.For(target) | ast.AsyncFor(target):
            yield from _attributes(target)
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from _attributes(target)
        case _:
            return


def _attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    match target:
        case ast.Attribute():
            yield target
        case ast.Tuple(items) | ast.List(items):
            for item in items:
                yield from _attributes(item)
        case ast.Starred(item):
            yield from _attributes(item)
        case _:
            return


def _owner_of(written: ast.Attribute, found: Type | None) -> TypeInfo | None:
    """Return the class that defines an attribute; None for one of an object's own, also where a base defines it."""
    if isinstance(written.value, ast.Name) and written.value.id in {"self", "cls"}:
        return None
    items = flatten_nested_unions(found.items) if isinstance(found, UnionType) else [found] if found else []
    infos = [item.type for part in items if isinstance(item := get_proper_type(part), Instance)]
    bases = (base for info in infos for base in info.mro if written.attr in base.names)
    return next(bases, next(iter(infos), None))


def _is_in(owner: TypeInfo, packages: tuple[str, ...]) -> bool:
    return owner.module_name.partition(".")[0] in packages

"""Replaces the code of imported functions in memory: no file is changed, and no module is loaded again."""

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType

from tests.removals.guards import Removal, marked, removals_of, source_of, without

Place = tuple[str, str, int]
"""A file, and the qualified name and first line of a function in it."""


class NotReplaceableError(Exception):
    """The code of a function can't be replaced: it has other free variables, or the function does not exist."""


class Functions:
    """The functions of the target modules that exist in this process, by their place in the source."""

    def __init__(self, files: frozenset[str]) -> None:
        self._found: defaultdict[Place, list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename in files:
                self._found[_place(each.__code__)].append(each)

    def replace(self, code: CodeType) -> None:
        """Give the functions of a place another code; raise NotReplaceableError."""
        functions = self._found.get(_place(code), [])
        if not functions:
            raise NotReplaceableError(f"{code.co_qualname} does not exist in this process")
        for function in functions:
            try:
                function.__code__ = code
            except ValueError as error:
                raise NotReplaceableError(f"{code.co_qualname}: {error}") from error


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def remove(functions: Functions, removal: Removal) -> None:
    """Remove a guard from the functions of this process; raise NotReplaceableError."""
    tree, site = without(removal)
    if site.limit is not None:
        _set_limit(removal.module, *site.limit)
        return
    functions.replace(_codes(tree, removal.module)[site.outermost, site.line])


def _set_limit(module: str, name: str, number: float) -> None:
    """Give a number of a module another value, in all modules that have imported it."""
    before = sys.modules[module].__dict__[name]
    for each in tuple(sys.modules.values()):
        names = getattr(each, "__dict__", {})
        if names.get(name) is before:
            names[name] = number


def mark(functions: Functions, module: str, reached: set[str]) -> None:
    """Add the key of each removal of a module to `reached` whenever its site is executed."""
    tree, sites = marked(module)
    codes = _codes(tree, module)
    keys = [removal.key for removal in removals_of(module, source_of(module).read_text())]

    def note(number: int) -> bool:
        reached.add(keys[number])
        return True

    sys.modules[module].__dict__["__reached__"] = note
    for place in {(site.outermost, site.line) for site in sites if site.limit is None}:
        functions.replace(codes[place])


def _codes(tree: ast.Module, module: str) -> Mapping[tuple[str, int], CodeType]:
    """Return the codes of all functions of a module, by qualified name and first line."""
    found = _nested(compile(tree, str(source_of(module)), "exec", dont_inherit=True))
    return {(code.co_qualname, code.co_firstlineno): code for code in found}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)

"""Runs the child of a hypervisor's connection without one guard: `inchild.py KEY [ARGUMENT...]`.

Without the child's arguments it only removes the guard, which shows that it can.
"""

import runpy
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.removals.guards import name_of, removals_of, source_of, without


def load_without_guard(key: str) -> None:
    """Load the module of a guard without it; raise StopIteration for an unknown guard."""
    module = name_of(key.partition(": ")[0])
    path = source_of(module)
    tree, _ = without(next(each for each in removals_of(module, path.read_text()) if each.key == key))
    code, shipped = compile(tree, str(path), "exec", dont_inherit=True), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return code if name == module else shipped(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]  # `__main__` is loaded by it, too
    assert module not in sys.modules
    import_module(module)


if __name__ == "__main__":
    load_without_guard(sys.argv.pop(1))
    if sys.argv[1:]:
        runpy.run_module("gpuvirt_schedules.hypervisors.child", run_name="__main__")

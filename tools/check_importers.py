"""Finds modules that could be one with their only importer: those that stay apart stand below, with the reason.

Two modules of different top-level packages need no reason, since a layer is between them, and neither do two that have
more than 300 lines together.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shipped import SOURCES

MOST_LINES = 300

CHECK = "one of the checks"
APART: Mapping[str, str] = {
    "hardware/access/writer.py": "started by its path",
    **{f"agent/kubelet/proto/{name}_pb2.py": "generated" for name in ("dra", "pluginregistration", "podresources")},
    "diagnosis/checks/devices.py": CHECK,
    "diagnosis/checks/kata.py": CHECK,
    "diagnosis/checks/runtime.py": CHECK,
    "model/reasons/findingcodes.py": "one of the two lists of codes",
    "agent/reconcile/unitchanges.py": "gates belong to changes; its importer decides when these begin",
    "cli/examples.py": "loaded with a help alone, not by an agent",
    "webhook/pages.py": "answers requests; its importer is the process",
    "webhook/review.py": "reads and writes reviews; its importer answers requests",
}
"""The modules that stay apart from their only importer."""


def _imports(path: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a module imports, wherever the import is."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                above = package[: len(package) + 1 - level] if level else []
                source = ".".join((*above, *((module,) if module else ())))
                for alias in names:
                    inner = f"{source}.{alias.name}"
                    yield inner if inner in modules else source
            case _:
                pass


def find_faults(sources: Sequence[Path], apart: Mapping[str, str]) -> list[str]:
    """Return the modules that could be one with their only importer, and the reasons for modules that could not."""
    shown_as = {
        path: path.relative_to(folder).as_posix() for folder in sources for path in sorted(folder.rglob("*.py"))
    }
    modules = {_name(shown): path for path, shown in shown_as.items()}
    importers = defaultdict[str, set[str]](set)
    for name, path in modules.items():
        for imported in _imports(path, name, modules):
            if imported != name:
                importers[imported].add(name)
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    alone = {name: next(iter(others)) for name, others in importers.items() if len(others) == 1 and name in modules}
    faults, known = list[str](), set[str]()
    for name, importer in sorted(alone.items()):
        path, together = modules[name], lines[name] + lines[importer]
        shown = shown_as[path].removeprefix("gpuvirt/")
        known.add(shown)
        if path.name == "__init__.py" or shown in apart or name.split(".")[:2] != importer.split(".")[:2]:
            continue
        if together <= MOST_LINES:
            faults.append(f"{shown}: only {importer} imports it, and both have {together} lines: could they be one?")
    return faults + [f"{name}: does not have one importer alone" for name in sorted(apart.keys() - known)]


def _name(shown: str) -> str:
    return shown.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def main() -> int:
    """Check the packages, or the folder of others."""
    faults = find_faults([Path(sys.argv[1])], {}) if sys.argv[1:] else find_faults(SOURCES, APART)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

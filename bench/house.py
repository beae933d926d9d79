"""Counts what has to be read: lines, modules and imports of the shipped packages, and the words of the pages.

.venv/bin/python -m bench.house                    # of this checkout
.venv/bin/python -m bench.house --checkout DIR     # and of another one beside it
"""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bench.results import Results

ROOT = Path(__file__).parent.parent
PACKAGES = ("src/gpuvirt", "schedules/src/gpuvirt_schedules")
AGENT = ("gpuvirt.cli.services.node", "gpuvirt.agent.process", "gpuvirt.agent.cluster.clusterside")
"""Where the privileged program begins."""


def modules_of(checkout: Path) -> Mapping[str, Path]:
    """Return the files of all modules by name, those of packages included."""
    files = (path for package in PACKAGES for path in (checkout / package).rglob("*.py"))
    return {_name(path.relative_to(checkout)): path for path in files}


def _name(path: Path) -> str:
    return ".".join(path.parts[path.parts.index("src") + 1 :]).removesuffix(".py").removesuffix(".__init__")


def imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a module imports, wherever the import is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name if name in modules else node.module for name in inner.values())


def closure(starts: Iterable[str], modules: Mapping[str, Path]) -> set[str]:
    """Return the modules that are loaded with others."""
    reached, waiting = set[str](), [start for start in starts if start in modules]
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += [each for each in imports(modules[name], modules) if each in modules]
    return reached


def count(checkout: Path) -> Iterator[tuple[str, float]]:
    """Yield each figure of a checkout."""
    modules = modules_of(checkout)
    written = {name: path for name, path in modules.items() if path.name != "__init__.py"}
    parts = {
        "core": [name for name in written if not name.startswith("gpuvirt_schedules")],
        "schedules": [name for name in written if name.startswith("gpuvirt_schedules")],
        "the agent's imports": [name for name in closure(AGENT, modules) if name in written],
    }
    for what, names in parts.items():
        yield f"{what}, lines", sum(len(written[name].read_text().splitlines()) for name in names)
        yield f"{what}, modules", len(names)
    importers = defaultdict[str, set[str]](set)
    for name, path in modules.items():
        for imported in imports(path, modules):
            importers[imported].add(name)
    yield "modules with one importer", sum(len(importers[name] - {name}) == 1 for name in written)
    pages = [page for folder in ("docs", "deploy", "lab", "tests") for page in (checkout / folder).rglob("*.md")]
    pages += [page for page in checkout.glob("*.md") if page.name != "CHANGELOG.md"]
    yield "words of the pages", sum(len(re.findall(r"\S+", page.read_text())) for page in pages)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="another checkout, before this one")
    checkout: Path | None = parser.parse_args().checkout
    results, columns = Results(), {"checkout": checkout, "gpuvirt": ROOT}
    for column, folder in columns.items():
        for what, figure in count(folder) if folder is not None else ():
            results.add(column, what, figure)
    print(results.table([column for column, folder in columns.items() if folder is not None]))


if __name__ == "__main__":
    main()

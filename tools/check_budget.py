"""Compares what each room of the house has with `budget.toml`: more than that is a fault."""

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping

from shipped import ROOT, modules

BUDGET = ROOT / "budget.toml"

Sizes = Mapping[str, Mapping[str, int]]


def rooms() -> Sizes:
    """Return the lines, the modules and the largest module of each room; what lies in no folder is the room `base`."""
    found = defaultdict[str, list[int]](list)
    for name, path in modules():
        room, _, below = name.partition("/")
        if path.name != "__init__.py":
            found[room if below else "base"].append(len(path.read_text().splitlines()))
    sizes = sorted(found.items())
    return {room: {"lines": sum(lines), "modules": len(lines), "largest": max(lines)} for room, lines in sizes}


def words() -> int:
    """Return the words of all pages for people; generated tables count as well."""
    pages = [path for folder in ("docs", "deploy", "lab", "tests") for path in (ROOT / folder).rglob("*.md")]
    pages += ROOT.glob("*.md")
    return sum(len(re.findall(r"\S+", page.read_text())) for page in pages if page.name != "CHANGELOG.md")


def find_faults(budget: Sizes, sizes: Sizes) -> Iterator[str]:
    """Yield what is above its budget, what has none, and budgets of nothing."""
    for room in sorted(budget.keys() | sizes.keys()):
        has, may = sizes.get(room, {}), budget.get(room, {})
        for what in sorted(has.keys() | may.keys()):
            size, most = has.get(what), may.get(what)
            if size is None:
                yield f"{room}.{what}: there is none any more; take the line away"
            elif most is None:
                yield f"{room}.{what}: has no budget; there are {size}"
            elif size > most:
                yield f"{room}.{what}: {size}, and the budget is {most}; make it smaller, or raise it with a reason"


def main() -> int:
    """Print the faults; return 1 if there are any."""
    sizes = {**rooms(), "docs": {"words": words()}}
    budget = tomllib.loads(BUDGET.read_text())
    del budget["roads"]  # a test runs the agent, and counts
    faults = [f"{BUDGET.name}: {fault}" for fault in find_faults(budget, sizes)]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

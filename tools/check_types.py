"""Checks two rules by the types that mypy infers: on what may be unknown, and on errors."""

import sys
from argparse import ArgumentParser
from pathlib import Path

import check_excepts
import check_unknown
from shipped import SOURCES
from typedsources import typed_sources


def main() -> int:
    """Check the package, or all Python files below another folder."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, nargs="*", default=SOURCES, help="the folders of the packages")
    parser.add_argument(
        "--deciding", nargs="*", default=check_unknown.DECIDING, help="the paths below it where rule 1 is decided"
    )
    asked = parser.parse_args()
    # What protoc generates has stubs beside it.
    paths = [
        path for root in asked.root for path in sorted(root.rglob("*.py")) if not path.with_suffix(".pyi").exists()
    ]
    sources, errors = typed_sources(paths, asked.root)
    faults = [fault for source in sources for fault in check_unknown.find_faults(source, tuple(asked.deciding))]
    faults += [fault for source in sources for fault in check_excepts.find_faults(source, tuple(asked.deciding))]
    for line in (*errors, *sorted(faults)):
        print(line)
    return 1 if faults or errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""The packages that are shipped: gpuvirt's own and that of gpuvirt-schedules."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src", ROOT / "schedules/src")
"""The folders of the packages."""


def modules(*folders: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path of each module below `gpuvirt`, or with the name of another package in front, and its file.

    `folders` are those of the packages, if they are not the shipped ones.
    """
    for folder in folders or SOURCES:
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(folder).as_posix().removeprefix("gpuvirt/"), path

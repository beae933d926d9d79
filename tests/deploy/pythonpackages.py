"""The Python packages of an image: the distributions that are installed there, and files of no distribution."""

import csv
import re
from collections.abc import Mapping
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import msgspec

IN_PACKAGES = re.compile(r"(?P<folder>(?:^|.*/)lib/python3[^/]*/(?:site|dist)-packages)/(?P<path>.+)")
NAME = re.compile(r"[A-Za-z0-9._-]+")
DIST_INFO = ".dist-info"
EXTRAS = ("libvirt", "vsphere")
"""The extras of gpuvirt-schedules that the Dockerfile installs."""
BROUGHT = frozenset({"annotated-doc", "cffi", "markdown-it-py", "mdurl", "pycparser", "pygments", "shellingham"})
"""The distributions that typer, rich and cryptography bring."""
MADE_BY_PYTHON = "__pycache__"
WHITEOUT = ".wh."
"""The beginning of the name of a file by which a layer hides what is below it."""


class Project(msgspec.Struct, frozen=True, rename="kebab"):
    """The distributions that gpuvirt requires."""

    name: str
    dependencies: tuple[str, ...]
    optional_dependencies: Mapping[str, tuple[str, ...]]


class PyProject(msgspec.Struct, frozen=True):
    """pyproject.toml."""

    project: Project


class Packages(msgspec.Struct, frozen=True):
    """The packages that can be imported beside Python's own library."""

    distributions: frozenset[str]
    strays: frozenset[str]
    """The entries of folders of packages that have files of no distribution."""


def packages_of(files: Mapping[str, bytes]) -> Packages:
    """Return the packages among these files, each by its path; only METADATA and RECORD are read."""
    distributions: set[str] = set()
    recorded: set[str] = set()
    present: dict[str, str] = {}
    for name, content in files.items():
        found = IN_PACKAGES.fullmatch(name)
        if found is None:
            continue
        folder, path = found["folder"], PurePosixPath(found["path"])
        match path.parts:
            case [top, "METADATA"] if top.endswith(DIST_INFO):
                distributions.add(normalized(message_from_bytes(content)["Name"]))
            case [top, "RECORD"] if top.endswith(DIST_INFO):
                recorded |= {f"{folder}/{row[0]}" for row in csv.reader(content.decode().splitlines()) if row}
            case _:
                pass
        if MADE_BY_PYTHON not in path.parts and not path.name.startswith(WHITEOUT):
            present[name] = f"{folder}/{path.parts[0]}"
    return Packages(
        frozenset(distributions), frozenset(entry for name, entry in present.items() if name not in recorded)
    )


def expected_distributions(tree: Path) -> frozenset[str]:
    """Return the image's distributions by the tree's projects: these, their dependencies, and those that they bring."""
    core, schedules = (
        msgspec.toml.decode((tree / folder / "pyproject.toml").read_bytes(), type=PyProject).project
        for folder in (".", "schedules")
    )
    optional = (line for extra in EXTRAS for line in schedules.optional_dependencies[extra])
    lines = (core.name, *core.dependencies, schedules.name, *schedules.dependencies, *optional)
    return BROUGHT | {requirement_name(line) for line in lines}


def requirement_name(requirement: str) -> str:
    """Return the name of the distribution that a requirement is about."""
    found = NAME.match(requirement)
    assert found is not None, requirement
    return normalized(found[0])


def normalized(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()

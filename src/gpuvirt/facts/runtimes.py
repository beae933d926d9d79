"""The configurations of container runtimes (TOML), with the tables that have CDI's settings."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.facts.platform import Attribute

CDI_TABLES = (
    ("plugins", "io.containerd.cri.v1.runtime"),
    ("plugins", "io.containerd.grpc.v1.cri"),
    ("crio", "runtime"),
)
"""The tables with CDI's settings: of containerd 2, containerd 1 and CRI-O."""

CDI_KEYS = ("enable_cdi", "cdi_spec_dirs")


class Runtime(msgspec.Struct, frozen=True):
    """One runtime's files in the order in which it loads them: the main file, then the files that it imports."""

    files: tuple[Attribute, ...]

    @property
    def own(self) -> Attribute:
        """The main file, which names all others."""
        return self.files[0]


def parse_toml(text: str) -> Mapping[str, object] | None:
    """Return a TOML document, None if the text is not TOML."""
    try:
        # tomllib parses nested brackets recursively.
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def cdi_tables(document: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield the tables of a document that may have CDI's settings, with their paths."""
    for path in CDI_TABLES:
        table: object = document
        for name in path:
            table = table.get(name) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            yield path, table


def enables_cdi(runtimes: Iterable[Runtime]) -> bool | None:
    """Return the setting `enable_cdi` of the runtimes' configurations, None where none has it; the last file counts."""
    files = (file for runtime in runtimes for file in runtime.files)
    tables = (table for file in files for _, table in cdi_tables(parse_toml(file.text or "") or {}))
    found = [table["enable_cdi"] for table in tables if isinstance(table.get("enable_cdi"), bool)]
    return bool(found[-1]) if found else None

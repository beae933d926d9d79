"""Container runtimes' configurations: TOML, of which nothing matters here but what it says of CDI."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.facts.platform import Attribute

CDI_TABLES = (
    ("plugins", "io.containerd.cri.v1.runtime"),
    ("plugins", "io.containerd.grpc.v1.cri"),
    ("crio", "runtime"),
)
"""Where the settings stand: containerd 2, containerd 1, CRI-O."""

CDI_KEYS = ("enable_cdi", "cdi_spec_dirs")


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime's files in the order in which it loads them: its own first, then those that it imports."""

    files: tuple[Attribute, ...]

    @property
    def own(self) -> Attribute:
        """The file that names all others."""
        return self.files[0]


def parse_toml(text: str) -> Mapping[str, object] | None:
    """Return a TOML document, None for what is none."""
    try:
        # Brackets in brackets are read by functions that call themselves.
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def cdi_tables(document: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield the tables of a document in which CDI's settings may stand, by their paths."""
    for path in CDI_TABLES:
        table: object = document
        for name in path:
            table = table.get(name) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            yield path, table

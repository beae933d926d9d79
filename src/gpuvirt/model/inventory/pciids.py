"""The names of PCI ids, from the PCI ID database of gpuvirt, that of the host, or one that the admin names.

Names of resources follow from these names, so gpuvirt's own database comes first, and changes only with a release. The
host's database is used for ids that gpuvirt's lacks. A database that the admin names replaces both.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec
from typing_extensions import override

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciId

_FILE = Path(__file__).with_name("data") / "pci.ids"
"""importlib.resources is not used, since it loads a third of a megabyte of other modules."""

_VENDOR = re.compile(r"([0-9a-f]{4})[ \t]+(\S.*)")
_DEVICE = re.compile(r"\t([0-9a-f]{4})[ \t]+(\S.*)")
_IGNORED = re.compile(r"\s*|#.*|\t\t.*|C [0-9a-f]{2}\s+\S.*|\t[0-9a-f]{2}\s+\S.*|ffff.*|\t?\s*#.*")

Texts = Mapping[PciId, str]


def parse(text: str, *, where: str) -> Texts:
    """Return the names of devices in a pci.ids file, or raise ConfigError at the first malformed line.

    Lines are `vvvv  vendor`, TAB `dddd  device`, TAB TAB subsystems, `C` classes, comments. Blank lines are ignored.
    """
    found: dict[PciId, str] = {}
    vendor: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if device := _DEVICE.fullmatch(line):
            if vendor is None:
                raise ConfigError("a device comes before any vendor", where=f"{where}:{number}", path=line.strip())
            found[PciId(vendor, int(device[1], 16))] = device[2].strip()
        elif match := _VENDOR.fullmatch(line):
            vendor = int(match[1], 16)
        elif not _IGNORED.fullmatch(line):
            raise ConfigError(
                "not a line of a pci.ids file: expected 'vvvv  vendor' or TAB 'dddd  device', lower-case hexadecimal",
                where=f"{where}:{number}",
                path=repr(line[:60]),
            )
    if not found:
        raise ConfigError("has no device: expected a pci.ids file", where=where)
    return found


class _Shipped(Mapping[PciId, str]):
    """The database of gpuvirt, which is searched as text.

    A node has a few of its 3,489 devices, and a dictionary of all would take a megabyte of each agent's memory.
    """

    def __init__(self, text: str) -> None:
        sections = re.split(r"^(?=[0-9a-f]{4} )", text, flags=re.MULTILINE)[1:]
        self._by_vendor = {int(section[:4], 16): section for section in sections}
        self._found = cache(self._find)

    def _find(self, pci_id: PciId) -> str | None:
        section = self._by_vendor.get(pci_id.vendor, "")
        begin = f"\n\t{pci_id.device:04x}  "
        at = section.find(begin)
        return section[at + len(begin) : section.index("\n", at + 1)] if at >= 0 else None

    @override
    def __getitem__(self, pci_id: PciId) -> str:
        if (text := self._found(pci_id)) is None:
            raise KeyError(pci_id)
        return text

    @override
    def __iter__(self) -> Iterator[PciId]:
        return iter(parse("".join(self._by_vendor.values()), where="pci.ids of gpuvirt"))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


class Deferred(Mapping[PciId, str]):
    """A database that is read at the first use: the host's takes 0.1 s and is seldom needed."""

    def __init__(self, load: Callable[[], Texts]) -> None:
        self._load = cache(load)

    @override
    def __getitem__(self, pci_id: PciId) -> str:
        return self._load()[pci_id]

    @override
    def __iter__(self) -> Iterator[PciId]:
        return iter(self._load())

    @override
    def __len__(self) -> int:
        return len(self._load())


@cache
def shipped() -> Texts:
    """Return the database of gpuvirt."""
    return _Shipped(_FILE.read_text("utf-8"))


class PciIds(msgspec.Struct, frozen=True):
    """Databases in the order in which they are searched."""

    sources: tuple[Texts, ...]

    def text(self, pci_id: PciId) -> str | None:
        """Return the name in the first database that has an id, None if none has it."""
        return next((source[pci_id] for source in self.sources if pci_id in source), None)

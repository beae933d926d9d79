"""What PCI ids are called: the PCI ID database that comes with gpuvirt, the system's, or one that the admin names.

Names decide what resources are called, so the database that comes with gpuvirt has the first word and changes with a
release alone. The system's is asked for ids that ours lacks. A database that the admin names replaces both.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typing_extensions import override

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciId

_FILE = Path(__file__).with_name("data") / "pci.ids"
"""Not by importlib.resources, which loads a third of a megabyte of other modules."""

_VENDOR = re.compile(r"([0-9a-f]{4})[ \t]+(\S.*)")
_DEVICE = re.compile(r"\t([0-9a-f]{4})[ \t]+(\S.*)")
_IGNORED = re.compile(r"\s*|#.*|\t\t.*|C [0-9a-f]{2}\s+\S.*|\t[0-9a-f]{2}\s+\S.*|ffff.*|\t?\s*#.*")

Texts = Mapping[PciId, str]


def parse(text: str, *, where: str) -> Texts:
    """Return what a pci.ids file calls each device, or raise ConfigError at the first line that is none of its own.

    Lines are `vvvv  vendor`, TAB `dddd  device`, TAB TAB subsystems, `C` classes, comments. A blank line ends nothing.
    """
    found: dict[PciId, str] = {}
    vendor: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if device := _DEVICE.fullmatch(line):
            if vendor is None:
                raise ConfigError("a device stands before any vendor", where=f"{where}:{number}", path=line.strip())
            found[PciId(vendor, int(device[1], 16))] = device[2].strip()
        elif match := _VENDOR.fullmatch(line):
            vendor = int(match[1], 16)
        elif not _IGNORED.fullmatch(line):
            raise ConfigError(
                "no line of a pci.ids file: expected 'vvvv  vendor' or TAB 'dddd  device', hexadecimal in lower case",
                where=f"{where}:{number}",
                path=repr(line[:60]),
            )
    if not found:
        raise ConfigError("holds no device: expected a pci.ids file", where=where)
    return found


class _Shipped(Mapping[PciId, str]):
    """The database that comes with gpuvirt, searched as the text that it is.

    A node has a handful of its 3,489 devices; a dictionary of all takes a megabyte of each agent's memory.
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
    """A database that is read when the first id is looked for in it: the system's takes 0.1 s and is seldom needed."""

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
    """Return the database that comes with gpuvirt."""
    return _Shipped(_FILE.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class PciIds:
    """Databases in the order in which they are asked."""

    sources: tuple[Texts, ...]

    def text(self, pci_id: PciId) -> str | None:
        """Return what the first database that knows an id calls it."""
        return next((source[pci_id] for source in self.sources if pci_id in source), None)

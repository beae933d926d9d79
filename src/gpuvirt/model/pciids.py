"""What PCI ids are called: the PCI ID database that comes with gpuvirt, the system's, or one that the admin names.

Names decide what resources are called, so the database that comes with gpuvirt has the first word and changes with a
release alone. The system's is asked for ids that ours lacks. A database that the admin names replaces both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciId

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


@cache
def shipped() -> Texts:
    """Return the database that comes with gpuvirt."""
    file = resources.files("gpuvirt.model") / "data" / "pci.ids"
    return parse(file.read_text("utf-8"), where="pci.ids of gpuvirt")


@dataclass(frozen=True, slots=True)
class PciIds:
    """Databases in the order in which they are asked."""

    sources: tuple[Texts, ...]

    def text(self, pci_id: PciId) -> str | None:
        """Return what the first database that knows an id calls it."""
        return next((source[pci_id] for source in self.sources if pci_id in source), None)

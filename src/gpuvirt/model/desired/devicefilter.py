"""The filters of vGPU configs that select GPUs by their PCI ids: `0x223610DE`, `0x25B610DE:0x157E10DE`.

Source: vgpu-device-manager. Each half is a number of 32 bits, the device above the vendor, in Go's syntax for
integers; without the second half, every subsystem matches.
"""

import re
from dataclasses import dataclass

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciId

_INTEGER = re.compile(
    r"(?:0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<bin>(?:_?[01])+)|0[oO]?(?P<oct>(?:_?[0-7])+)"
    r"|(?P<dec>0|[1-9](?:_?[0-9])*))"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_MOST_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """The PCI ids that a GPU must have."""

    device: PciId
    subsystem: PciId | None = None

    @property
    def text(self) -> str:
        """The filter in the syntax of configs."""
        return ":".join(f"0x{ids.device:04X}{ids.vendor:04X}" for ids in (self.device, self.subsystem) if ids)

    def matches(self, device: PciId, subsystem: PciId | None) -> bool:
        """Return whether a GPU has these ids; an unreadable subsystem (None) matches no filter with a subsystem."""
        return self.device == device and self.subsystem in {None, subsystem}


def parse_filter(text: str) -> DeviceFilter:
    """Return a filter, or raise InvalidIdError."""
    halves = [_id(half) for half in text.split(":")]
    device, subsystem = halves[0], halves[1] if len(halves) > 1 else None
    if device is None or len(halves) > 2 or (len(halves) == 2 and subsystem is None):
        raise InvalidIdError(
            "a device filter",
            text,
            "0xDDDDVVVV or 0xDDDDVVVV:0xSSSSVVVV, device id and vendor id in one number, as in 0x223610DE",
        )
    return DeviceFilter(device, subsystem)


def _id(text: str) -> PciId | None:
    match = _INTEGER.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
    if not match or match.lastgroup is None:
        return None
    number = int(match[match.lastgroup].replace("_", ""), _BASES[match.lastgroup])
    return PciId(number & 0xFFFF, number >> 16) if number < 1 << 32 else None

"""The parts of a CDI spec by which runtimes find devices (tags.cncf.io/container-device-interface, SPEC.md)."""

import re

import msgspec

from gpuvirt import plain
from gpuvirt.errors import ConfigError

Version = tuple[int, int, int]
_VERSION = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})")
_KIND = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,250}[A-Za-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,250}[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]{0,250}[A-Za-z0-9])?")


class CdiSpec(msgspec.Struct, frozen=True):
    """One spec."""

    version: str
    kind: str
    devices: tuple[str, ...]

    @property
    def numbers(self) -> Version:
        """The version as numbers."""
        return version_of(self.version) or (0, 0, 0)


def version_of(text: str) -> Version | None:
    """Return a version as numbers, None for another text."""
    found = _VERSION.fullmatch(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found is not None else None


def parse_spec(text: str) -> CdiSpec | None:
    """Return a spec (JSON or YAML), None if it is not valid."""
    try:
        document = plain.read(text, where="spec").content
    except ConfigError:
        return None
    if not isinstance(document, dict):
        return None
    version, kind, devices = (document.get(key) for key in ("cdiVersion", "kind", "devices"))
    if not (isinstance(version, str) and version_of(version) and isinstance(kind, str) and _KIND.fullmatch(kind)):
        return None
    if not isinstance(devices, list) or not devices:
        return None
    names = [device.get("name") if isinstance(device, dict) else None for device in devices]
    named = [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)]
    return CdiSpec(version, kind, tuple(named)) if len(named) == len(names) else None

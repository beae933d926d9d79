"""The differences between the facts of a host and those of its simulation: address, field and both values."""

from collections.abc import Iterable, Iterator, Mapping, Sized

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.setup import Setup, parts
from gpuvirt.facts.snapshot import Facts, Platform
from gpuvirt.facts.vgpu import VgpuHost

MOST_SHOWN = 100

Record = PciFunction | VgpuHost | Platform


class Loss(msgspec.Struct, frozen=True):
    """A property of a host that its simulation does not show."""

    where: str
    what: str
    why: str

    @property
    def text(self) -> str:
        """The loss as one line."""
        return f"{self.where}: {self.what}: {self.why}"


def differences(host: Facts, simulated: Facts) -> Iterator[Loss]:
    """Yield where `simulated` differs from `host`; boot ids and processes are not simulated, and are left out."""
    yield from _records("functions", host.functions, simulated.functions)
    yield from _records("vGPUs", host.vgpu_hosts, simulated.vgpu_hosts)
    for name in ("group_nodes", "cdev_nodes"):
        yield from _sets(name, getattr(host, name), getattr(simulated, name))
    yield from _fields("platform", host.platform, simulated.platform, leave=("boot_id",))
    for malformed in host.malformed_entries:
        yield Loss(malformed.path, "malformed entry", malformed.what)
    for unread in host.unread:
        yield Loss(unread.path, "not read", unread.detail)


def setup_differences(host: Setup, simulated: Setup) -> Iterator[Loss]:
    """Yield where doctor reads other values on `simulated` than on `host`; processes are left out."""
    host_parts, simulated_parts = parts(host), parts(simulated)
    for path in sorted({*host_parts, *simulated_parts}):
        real, copy = host_parts.get(path), simulated_parts.get(path)
        if real != copy:
            shown = (part.shown if part is not None else "not read" for part in (real, copy))
            yield Loss(path, "platform", "{} on the host, {} on the simulated host".format(*shown))


def _records(what: str, host: Mapping[PciAddress, Record], simulated: Mapping[PciAddress, Record]) -> Iterator[Loss]:
    for address in sorted({*host, *simulated}):
        real, copy = host.get(address), simulated.get(address)
        if real is None or copy is None:
            yield Loss(address, what, _only_on(simulated=real is None))
        elif real != copy:
            yield from _fields(address, real, copy)


def _fields(where: str, host: Record, simulated: Record, leave: Iterable[str] = ()) -> Iterator[Loss]:
    for field in host.__struct_fields__:
        real, copy = getattr(host, field), getattr(simulated, field)
        if real != copy and field not in leave:
            yield Loss(where, field, f"{_shown(real)} on the host, {_shown(copy)} on the simulated host")


def _sets(where: str, host: frozenset[object], simulated: frozenset[object]) -> Iterator[Loss]:
    for entry in sorted(host ^ simulated, key=str):
        yield Loss(where, str(entry), _only_on(simulated=entry in simulated))


def _only_on(*, simulated: bool) -> str:
    return "only on the simulated host" if simulated else "only on the host"


def _shown(value: object) -> str:
    if isinstance(value, Unread):
        return f"not read ({value.detail})"
    if isinstance(value, tuple) and value and all(isinstance(part, Unread) for part in value):
        return ", ".join(f"{part.path} not read ({part.detail})" for part in value)[:MOST_SHOWN]
    if isinstance(value, Sized) and not isinstance(value, str) and not value:
        return "none"
    text = "none" if value is None else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."

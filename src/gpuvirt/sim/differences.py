"""What one look at a host shows otherwise than another: line by line, with the address, what, and both values."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.setup import Setup, parts
from gpuvirt.facts.snapshot import Facts, Platform
from gpuvirt.facts.vgpu import VgpuHost

MOST_TOLD = 100

Record = PciFunction | VgpuHost | Platform


@dataclass(frozen=True, slots=True)
class Loss:
    """Something of a host that a machine does not show."""

    where: str
    what: str
    why: str

    @property
    def text(self) -> str:
        """The loss as a line."""
        return f"{self.where}: {self.what}: {self.why}"


def differences(host: Facts, simulated: Facts) -> Iterator[Loss]:
    """Yield what `machine` shows otherwise than `host`; boots and who has what open are no part of a machine."""
    yield from _records("functions", host.functions, simulated.functions)
    yield from _records("vGPUs", host.vgpu_hosts, simulated.vgpu_hosts)
    for name in ("group_nodes", "cdev_nodes"):
        yield from _sets(name, getattr(host, name), getattr(simulated, name))
    yield from _fields("platform", host.platform, simulated.platform, leave=("boot_id",))
    for malformed in host.malformed_entries:
        yield Loss(malformed.path, "odd entry", malformed.what)
    for unread in host.unread:
        yield Loss(unread.path, "not read", unread.said)


def setup_differences(host: Setup, simulated: Setup) -> Iterator[Loss]:
    """Yield what doctor reads on `machine` otherwise than on `host`, but of processes, which are no part of one."""
    ones, others = parts(host), parts(simulated)
    for path in sorted({*ones, *others}):
        one, other = ones.get(path), others.get(path)
        if one != other:
            said = (part.shown if part is not None else "not looked at" for part in (one, other))
            yield Loss(path, "platform", "{} on the host, {} on the machine".format(*said))


def _records(what: str, host: Mapping[PciAddress, Record], simulated: Mapping[PciAddress, Record]) -> Iterator[Loss]:
    for key in sorted({*host, *simulated}):
        one, other = host.get(key), simulated.get(key)
        if one is None or other is None:
            yield Loss(key, what, "is of the host alone" if other is None else "is of the machine alone")
        elif one != other:
            yield from _fields(key, one, other)


def _fields(where: str, host: Record, simulated: Record, leave: Iterable[str] = ()) -> Iterator[Loss]:
    for field in dataclasses.fields(host):
        one, other = getattr(host, field.name), getattr(simulated, field.name)
        if one != other and field.name not in leave:
            yield Loss(where, field.name, f"{_told(one)} on the host, {_told(other)} on the machine")


def _sets(where: str, host: frozenset[object], simulated: frozenset[object]) -> Iterator[Loss]:
    for one in sorted(host ^ simulated, key=str):
        yield Loss(where, str(one), "is of the host alone" if one in host else "is of the machine alone")


def _told(value: object) -> str:
    if isinstance(value, Unread):
        return f"not read ({value.said})"
    if isinstance(value, tuple) and value and all(isinstance(one, Unread) for one in value):
        return ", ".join(f"{one.path} not read ({one.said})" for one in value)[:MOST_TOLD]
    if isinstance(value, Sized) and not isinstance(value, str) and not value:
        return "none"
    text = "none" if value is None else str(value)
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}..."

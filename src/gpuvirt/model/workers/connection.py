"""The inputs of a hypervisor's connection: the kind, the credentials of a Secret, and until when calls may be made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

from gpuvirt.clock import Clock
from gpuvirt.model.workers.hypervisor import Hypervisor

DEAD_AFTER_S = 5.0
"""How long after the end of its lease a connection's child is certainly dead. A new leader's first call waits for it.

The kernel kills the child at the end of the lease itself; the rest is for a busy host, and for the reset to arrive.
"""


class HypervisorKind(StrEnum):
    """The hypervisors that gpuvirt has a back end for."""

    VSPHERE = "vsphere"
    LIBVIRT = "libvirt"


KEYS: Mapping[HypervisorKind, tuple[str, ...]] = {
    HypervisorKind.VSPHERE: ("server", "ca", "user", "password"),
    HypervisorKind.LIBVIRT: ("server", "ca", "certificate", "key"),
}
"""The keys of a Secret. It has server, CA and credentials together, so that a schedule can't send them elsewhere."""


@dataclass(frozen=True, slots=True)
class HypervisorCredentials:
    """Where a hypervisor is, and who asks it. Neither `repr` nor any message shows more than the server."""

    server: str
    """`HOST` or `HOST:PORT`."""
    ca: str = field(repr=False)
    """PEM certificates; the server's certificate must be signed by one of them, on 127.0.0.1, too."""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    """PEM: the client's certificate, in the place of user and password."""
    key: str = field(default="", repr=False)
    """PEM: the key of the client's certificate."""

    @classmethod
    def of(cls, kind: HypervisorKind, data: Mapping[str, bytes]) -> Self | tuple[str, ...]:
        """Return the credentials of a Secret's decoded `data`, or the keys that are missing, empty, or no text."""
        texts = {key: _text(data.get(key, b"")).strip("\r\n") for key in KEYS[kind]}
        lacking = tuple(key for key, text in texts.items() if not text.strip())
        return lacking or cls(**(texts | {"server": texts["server"].strip()}))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""


MayCallUntil = Callable[[], float]
"""Returns the monotonic second until which this process holds the lease: `Election.may_write_until_s`.

A child reads the same monotonic clock. `math.inf` is for a command that only reads.
"""


class OpenHypervisor(Protocol):
    """Opens connections: `SharedHypervisors.open` of `gpuvirt_schedules`, which `controllerpart` injects."""

    async def __call__(
        self, kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
    ) -> Hypervisor:
        """Return a connection, whose child starts with the first request. Never raises: errors are answers."""

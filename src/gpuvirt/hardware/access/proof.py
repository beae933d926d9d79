"""The proof that nobody uses a device, which every write that takes a device from its users demands.

`agent.change.steps.proving` and `leasing` make proofs, and no other module does (`tools/check_proofs.py`). A proof
names its devices: addresses of functions and ids of vGPUs. A lease or a driver's lock proves for as long as it is held.
What was only read proves for one write, since the write may sleep while a process opens the next device; and for
`WITHIN_S`, since the computer may stop gpuvirt between the reading and the write.
"""

from collections.abc import Iterable
from enum import StrEnum
from math import inf
from time import monotonic  # noqa: TID251  a proof ages in every thread and process alike
from typing import Final

from gpuvirt.errors import GpuvirtError


class UnprovenError(GpuvirtError):
    """A write was about to take a device without a valid proof that nobody uses it. Nothing was written."""


class ProofKind(StrEnum):
    """The kinds of proof that nobody uses a device."""

    LEASE = "lease"
    """gpuvirt has the VFIO group, or the VFIO devices, open: no other process can open them."""
    DRIVER = "driver"
    """NVIDIA's driver admits no client (`unbindLock`), or answers NVIDIA's own tool, which takes the step."""
    WALK = "walk"
    """No process has a node of the device open or mapped, by a walk that sees every process."""
    DRIVERLESS = "driverless"
    """The function has no driver, and no unbind of it is under way."""
    FORCED = "forced"
    """An admin has ordered to take the device from the users of its native driver; never from a user of VFIO."""


READ: Final = frozenset({ProofKind.WALK, ProofKind.DRIVERLESS})
"""The proofs that were only read: they grow stale."""
WITHIN_S: Final = 5.0
"""How old the begin of such a reading may be at the write. A walk through thousands of processes takes a second."""
LASTING: Final = frozenset({ProofKind.LEASE})
"""The proofs that hold until they end. All others serve one write."""


class Proof:
    """The proof that nobody uses some devices."""

    __slots__ = ("_lasting", "_parts", "_spent", "devices", "kind", "until_s")

    def __init__(
        self, kind: ProofKind, devices: Iterable[str], *, lasting: bool = False, since_s: float | None = None
    ) -> None:
        """`lasting`: the proof serves any number of writes until it ends, such as a lock that is held.

        `since_s` is the monotonic second at which the reading has begun; None: now.
        """
        self.kind = kind
        self.devices = frozenset(devices)
        """Addresses of functions and ids of vGPUs."""
        self._lasting = lasting or kind in LASTING
        self._spent = False
        self.until_s = (monotonic() if since_s is None else since_s) + WITHIN_S if kind in READ else inf
        """The monotonic second at which it is too old."""
        self._parts: tuple[Proof, ...] = ()

    @staticmethod
    def joined(*proofs: "Proof") -> "Proof":
        """Return the proof of the devices of several proofs; it serves one write and spends them all.

        Raises UnprovenError without any proof.
        """
        if not proofs:
            raise UnprovenError("nothing proves that the device is free")
        first, *others = proofs
        proof = Proof(first.kind, first.devices.union(*(other.devices for other in others)))
        proof._parts = proofs
        proof.until_s = min(part.until_s for part in proofs)
        return proof

    @property
    def is_valid(self) -> bool:
        """Whether the proof still serves a write."""
        return not self._spent and monotonic() < self.until_s and all(part.is_valid for part in self._parts)

    def spend(self, *devices: str) -> None:
        """Use the proof for the write that follows; raise UnprovenError if it does not prove all these devices."""
        if monotonic() >= self.until_s:
            raise UnprovenError(
                f"{', '.join(devices)}: the {self.kind} that proved it free began over {WITHIN_S:g} s ago, since the"
                " computer was busy or stopped gpuvirt; try again"
            )
        if not self.is_valid:
            raise UnprovenError(f"{', '.join(devices)}: the {self.kind} that proved it free has ended")
        if missing := sorted(set(devices) - self.devices):
            proved = ", ".join(sorted(self.devices))
            raise UnprovenError(f"{', '.join(missing)} may be in use: the {self.kind} is that of {proved}")
        for part in self._parts:
            part.spend()
        self._spent = not self._lasting

    def end(self) -> None:
        """Make the proof invalid: the lease or the lock has ended."""
        self._spent = True

"""The allocations of GPUs to pods, or that they are unknown: two types, and no default turns one into the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.reasons import Reason

Allocations = Mapping[PciAddress, tuple[str, ...]]
"""The pods that each GPU, or a part of it, is allocated to; a GPU that is missing is not allocated."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The allocations are unknown: any device may be allocated."""

    reason: Reason | None = None
    """Why they are unknown; None if the kubelet has not reported since devices were last withdrawn."""
    known: Allocations = field(default_factory=dict)
    """The allocations that are known; there may be more."""

    def reason_for(self, subject: str) -> Reason | None:
        """Return the reason with a device or an isolation unit as its subject."""
        return None if self.reason is None else replace(self.reason, subject=subject)

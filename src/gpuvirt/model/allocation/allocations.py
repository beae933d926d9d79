"""Which pods have which GPUs, or that this is unknown: two types, and no default turns one into the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.reasons import Reason

Allocations = Mapping[PciAddress, tuple[str, ...]]
"""The pods that have each GPU, or a part of it; a GPU that is missing is allocated to none."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Any device may be allocated."""

    reason: Reason | None = None
    """Why that is so; None: the kubelet has not been asked since what is offered last became less."""
    known: Allocations = field(default_factory=dict)
    """What pods have at least."""

    def reason_for(self, subject: str) -> Reason | None:
        """Return the reason, as one about a device or an isolation unit."""
        return None if self.reason is None else replace(self.reason, subject=subject)

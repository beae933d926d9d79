"""Which pods have which GPUs, or that this is unknown: two types, and no default turns one into the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress


@dataclass(frozen=True, slots=True)
class Unknown:
    """Any device may be allocated."""

    why: str = "the kubelet has not been asked since what is offered last became less"


Allocations = Mapping[PciAddress, tuple[str, ...]]
"""The pods that have each GPU, or a part of it; a GPU that is missing is allocated to none."""

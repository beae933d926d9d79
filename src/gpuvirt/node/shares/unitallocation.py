"""The units of one container in the kubelet's record."""

from dataclasses import dataclass

from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.model.shares.demand import ContainerName


@dataclass(frozen=True, slots=True)
class UnitAllocation:
    """The units that one container has in the kubelet's record."""

    pod: PodUid
    container: ContainerName
    ids: frozenset[DeviceId]
    device: str | None
    """The CDI device of the answer to Allocate; None for an answer of another plugin."""

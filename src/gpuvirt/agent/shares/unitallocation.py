"""The units of one container in the kubelet's record."""

import msgspec

from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.model.shares.demand import ContainerName


class UnitAllocation(msgspec.Struct, frozen=True):
    """The units that one container has in the kubelet's record."""

    pod: PodUid
    container: ContainerName
    ids: frozenset[DeviceId]
    device: str | None
    """The CDI device of the answer to Allocate; None for an answer of another plugin."""

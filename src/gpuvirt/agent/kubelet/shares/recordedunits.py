"""Reads which containers have units of one resource from the kubelet's checkpoint, with the answers to Allocate."""

from collections.abc import Sequence

from gpuvirt.agent.kubelet import checkpoint, wire
from gpuvirt.agent.kubelet.checkpoint import PodDevices, allocations_unknown
from gpuvirt.agent.shares.unitallocation import UnitAllocation
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.sharespec import nonce_of
from gpuvirt.paths import KubeletPaths


class RecordedUnits:
    """The units in one kubelet's checkpoint, which the kubelet writes before it starts a container."""

    def __init__(self, paths: KubeletPaths, resource: ResourceName) -> None:
        self._path = paths.checkpoint
        self._resource = resource

    def read(self) -> Sequence[UnitAllocation] | Unknown:
        """Return the containers with units; a missing or damaged checkpoint makes them unknown."""
        try:
            entries = checkpoint.parse(self._path.read_bytes()).data.pod_device_entries or ()
            return [_allocation(entry) for entry in entries if entry.resource_name == self._resource]
        except OSError as error:
            return Unknown(allocations_unknown(f"{self._path}: {error.strerror}"))
        except DamagedError as error:
            return Unknown(allocations_unknown(f"{self._path}: {error}"))


def _allocation(entry: PodDevices) -> UnitAllocation:
    names = wire.cdi_devices(entry.alloc_resp or b"")
    ours = [name for name in names if nonce_of(name) is not None]
    return UnitAllocation(
        PodUid(entry.pod_uid),
        ContainerName(entry.container_name),
        frozenset(entry.ids()),
        ours[0] if len(ours) == 1 else None,
    )

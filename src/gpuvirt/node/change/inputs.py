"""What a change must know besides what the host shows: what pods have, what is offered, what the admin permits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.node.change.gate.gate import Read, no_readings


@dataclass(frozen=True, slots=True)
class Account:
    """What pods have."""

    pods: Allocations | Unknown
    """The pods that have each GPU, or a part of it."""
    allocations: PodAllocations = field(default_factory=PodAllocations)
    """The same by device, as the kubelet's account has it."""
    holdings: tuple[Holding, ...] = ()
    """The vGPUs that pods have."""
    offered: frozenset[VgpuId] = frozenset()
    """The vGPUs that the kubelet may give to a pod at any moment."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is known besides what the host shows."""

    account: Callable[[Inventory], Account]
    """Returns what pods have of a host as it was just observed; a change asks it under the unit's lock."""
    type_names: Mapping[str, VgpuType] = field(default_factory=dict)
    """The names of vGPU types, by the host's ids: a host names only those of which it could create another."""
    allowed: frozenset[PciAddress] = frozenset()
    """Functions of other slots that the admin permits to change their driver with a GPU of their group."""
    forced: bool = False
    """Whether processes of the host that use a GPU natively may lose it."""
    driver_may_come: bool = False
    """Whether a container may yet bring NVIDIA's driver."""

    readings: Read = no_readings
    """Returns what the kubelet's two accounts said lately; a change asks it under the unit's lock."""

    def newest(self, inventory: Inventory) -> PodAllocations:
        """Return what pods have by now; any thread calls it."""
        return self.account(inventory).allocations

"""The devices that a change may touch."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Scope:
    """Functions with all their vGPUs, and single vGPUs."""

    functions: frozenset[PciAddress] = frozenset()
    vgpus: frozenset[VgpuId] = frozenset()

    def covers(self, target: Target) -> bool:
        """Return whether a device is in the scope."""
        return target.gpu in self.functions or target.vgpu in self.vgpus

    def covers_id(self, inventory: Inventory, device: PciAddress | VgpuId) -> bool:
        """Return whether a function or a vGPU of a host is in the scope."""
        vgpu = inventory.vgpus.get(VgpuId(device))
        return device in self.functions or device in self.vgpus or (vgpu is not None and vgpu.gpu in self.functions)

    def includes(self, other: "Scope") -> bool:
        """Return whether another scope is a part of this one."""
        return other.functions <= self.functions and other.vgpus <= self.vgpus

    def with_all(self, others: Iterable["Scope"]) -> "Scope":
        """Return the union of this scope and others."""
        scopes = (self, *others)
        return Scope(
            frozenset[PciAddress]().union(*(scope.functions for scope in scopes)),
            frozenset[VgpuId]().union(*(scope.vgpus for scope in scopes)),
        )

"""Which devices a change may touch."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.candidates import Target


@dataclass(frozen=True, slots=True)
class Scope:
    """Functions with all that they carry, and single vGPUs."""

    functions: frozenset[PciAddress] = frozenset()
    vgpus: frozenset[VgpuId] = frozenset()

    def covers(self, target: Target) -> bool:
        """Return whether a device is among them."""
        return target.gpu in self.functions or target.vgpu in self.vgpus

    def with_all(self, others: Iterable["Scope"]) -> "Scope":
        """Return this scope and others as one."""
        scopes = (self, *others)
        return Scope(
            frozenset[PciAddress]().union(*(one.functions for one in scopes)),
            frozenset[VgpuId]().union(*(one.vgpus for one in scopes)),
        )

"""The two A10s of a simulated node, and the entries of their allocations."""

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.devices.candidates import Target
from gpuvirt_sim.clock import BEGINNING

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A10 = "nvidia.com/GA102GL_A10"


def entry_of(gpu: PciAddress) -> Entry:
    return Entry(ResourceName(A10), DeviceId(gpu), Target(gpu), IommuGroup(22), "allocate:1", BEGINNING)

"""The symptoms that an inventory shows for a device."""

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress
from gpuvirt.model.allocation.allocateddevices import find_allocated
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.devices.candidates import Candidate, Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.offers import symptoms
from gpuvirt.model.reasons import ReasonCode
from tests.agent.life.life import A10
from tests.agent.node.pictures import A10_NAME, decided_at, observed

GONE = PciAddress("0000:ff:00.0")


def offered() -> tuple[Inventory, Candidate]:
    """Return a host, and one of its devices, which is offered."""
    picture = observed()
    assert picture.inventory is not None
    offers = decided_at(picture).memory.offers
    return picture.inventory, offers.by_resource[A10_NAME].devices[DeviceId(A10)].candidate


def codes(inventory: Inventory, candidate: Candidate) -> list[ReasonCode]:
    nobody = find_allocated((), frozenset())
    found = symptoms(inventory, nobody, candidate, FormerTenants(), allocations_known=True, grace_without_driver=False)
    return [reason.code for reason in found]


@pytest.mark.parametrize(("carrier", "gpu"), [(A10, A10), (A10, GONE), (GONE, A10)])
def test_a_device_whose_functions_the_host_lacks_shows_no_symptom_of_them(carrier: PciAddress, gpu: PciAddress) -> None:
    inventory, candidate = offered()
    assert codes(inventory, replace(candidate, carrier=carrier, target=Target(gpu))) == []


def test_a_group_that_only_the_kernel_calls_busy_is_in_use() -> None:
    inventory, candidate = offered()
    assert candidate.group is not None
    facts = replace(inventory.facts, busy_groups={candidate.group: "the kernel answers EBUSY"})
    assert codes(replace(inventory, facts=facts), candidate) == [ReasonCode.IN_USE_ELSEWHERE]

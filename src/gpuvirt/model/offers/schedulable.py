"""How many of each resource the scheduler should count on a node, by what is offered and what the kubelet counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import OfferedDevice, Offers


@dataclass(frozen=True, slots=True)
class Count:
    """What may stand in the node's status: no more than is offered and stays, no less than the kubelet counts of it."""

    least: int
    most: int

    def corrected(self, said: int) -> int:
        """Return what is to stand there in the place of what is said."""
        return min(max(said, self.least), self.most)


def name_of(device: OfferedDevice) -> str:
    """Return what a device is called when it is to be withdrawn: its function, or its vGPU."""
    return device.candidate.target.vgpu or device.candidate.carrier


def free_names(offers: Offers) -> frozenset[str]:
    """Return what pods can be given."""
    return frozenset(name_of(device) for _, device in offers.devices() if device.health.healthy)


def counts(
    offers: Offers, going: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]
) -> Mapping[ResourceName, Count]:
    """Return the count of each resource; `going` is to be withdrawn, `counted` is what the kubelet admits pods by."""
    known = frozenset(counted)
    found: dict[ResourceName, Count] = {}
    for name, offer in offers.by_resource.items():
        healthy = [one for one in offer.devices.values() if one.health.healthy]
        stays = [one.id for one in healthy if name_of(one) not in going]
        found[name] = Count(sum((name, one) in known for one in stays), len(stays))
    return found


def is_known(counts: Mapping[ResourceName, Count], said: Mapping[ResourceName, int]) -> bool:
    """Return whether a node's status says of nothing more than there will be."""
    return all(said.get(name, 0) <= count.most for name, count in counts.items())

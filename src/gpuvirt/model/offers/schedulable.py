"""How many devices of each resource the scheduler should count on a node, by the offers and the kubelet's count."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import OfferedDevice, Offers


@dataclass(frozen=True, slots=True)
class Count:
    """The limits of a count in the node's status: the devices that stay; at least those that the kubelet counts."""

    least: int
    most: int

    def corrected(self, count: int) -> int:
        """Return the count within the limits that is nearest to a count of the node's status."""
        return min(max(count, self.least), self.most)


def name_of(device: OfferedDevice) -> str:
    """Return the name under which a device is withdrawn: its vGPU's id, or its function's address."""
    return device.candidate.target.vgpu or device.candidate.carrier


def free_names(offers: Offers) -> frozenset[str]:
    """Return the names of the healthy offered devices."""
    return frozenset(name_of(device) for _, device in offers.devices() if device.health.healthy)


def counts(
    offers: Offers, going: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]
) -> Mapping[ResourceName, Count]:
    """Return the limits of each resource; `going` is being withdrawn, `counted` are the kubelet's healthy devices."""
    of_kubelet = frozenset(counted)
    found: dict[ResourceName, Count] = {}
    for name, offer in offers.by_resource.items():
        healthy = [device for device in offer.devices.values() if device.health.healthy]
        stays = [device.id for device in healthy if name_of(device) not in going]
        found[name] = Count(sum((name, device) in of_kubelet for device in stays), len(stays))
    return found


def is_known(counts: Mapping[ResourceName, Count], of_status: Mapping[ResourceName, int]) -> bool:
    """Return whether no count in a node's status is above its limit."""
    return all(of_status.get(name, 0) <= count.most for name, count in counts.items())

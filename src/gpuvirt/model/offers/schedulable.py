"""How many devices of each resource the scheduler should count on a node, by the offers and the kubelet's count."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import OfferedDevice, Offers


class Count(msgspec.Struct, frozen=True):
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


class Taken(msgspec.Struct, frozen=True):
    """The devices and ids that the kubelet takes from this agent; another device plugin may offer the other devices."""

    offers: Offers
    on_demand: Mapping[ResourceName, Collection[DeviceId]] = msgspec.field(default_factory=dict)
    """The healthy ids of on-demand resources."""


def counts(
    taken: Taken, going: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]
) -> Mapping[ResourceName, Count]:
    """Return the limits of each resource; `going` is being withdrawn, `counted` are the kubelet's healthy devices.

    The first vGPU of an on-demand GPU takes the ids of its other types at once, without notice: the node's status falls
    with the list.
    """
    of_kubelet = frozenset(counted)
    stay: dict[ResourceName, Collection[DeviceId]] = dict(taken.on_demand)
    for name, offer in taken.offers.by_resource.items():
        healthy = (device for device in offer.devices.values() if device.health.healthy)
        stay[name] = [device.id for device in healthy if name_of(device) not in going]
    return {name: Count(sum((name, id_) in of_kubelet for id_ in ids), len(ids)) for name, ids in stay.items()}


def is_known(counts: Mapping[ResourceName, Count], of_status: Mapping[ResourceName, int]) -> bool:
    """Return whether no count in a node's status is above its limit."""
    return all(of_status.get(name, 0) <= count.most for name, count in counts.items())

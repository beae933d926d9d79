"""The offers to the kubelet: each resource with its devices and their health, and why other devices are not offered."""

from collections.abc import Iterator, Mapping
from operator import is_
from typing import TypeVar

import msgspec

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.offers.health import HEALTHY, Health, HealthVerdict, Key
from gpuvirt.model.reasons import Reason

T = TypeVar("T")


class OfferedDevice(msgspec.Struct, frozen=True):
    """A device of a resource."""

    candidate: Candidate
    health: Health = HEALTHY

    @property
    def id(self) -> DeviceId:
        """The id of the device in ListAndWatch."""
        return self.candidate.id


class Offer(msgspec.Struct, frozen=True):
    """A resource. It stays, with an empty list, when its last device goes: the kubelet counts unhealthy ids too."""

    resource: ResourceName
    devices: Mapping[DeviceId, OfferedDevice] = msgspec.field(default_factory=dict)


class Offers(msgspec.Struct, frozen=True):
    """All resources of a node, and why other devices are not offered."""

    by_resource: Mapping[ResourceName, Offer] = msgspec.field(default_factory=dict)
    withheld: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    """Why a device is not offered, by the reason's subject: a PCI address or a vGPU's id."""
    verdict: HealthVerdict = msgspec.field(default_factory=HealthVerdict)
    other_names: Mapping[ResourceName, frozenset[str]] = msgspec.field(default_factory=dict)
    """The names from today's PCI ID database, where a resource was first offered under another name."""
    of_withheld_resources: Mapping[ResourceName, tuple[Candidate, ...]] = msgspec.field(default_factory=dict)
    """Devices that would be offered if their resource were not withheld."""

    @property
    def names(self) -> frozenset[ResourceName]:
        """All resources, offered or withheld."""
        return frozenset(self.by_resource.keys() | self.of_withheld_resources.keys())

    def device(self, key: Key) -> OfferedDevice | None:
        """Return an offered device, None if it is not offered."""
        offer = self.by_resource.get(key[0])
        return offer.devices.get(key[1]) if offer is not None else None

    def is_same_as(self, other: "Offers") -> bool:
        """Return whether these are the same offers of the same devices, by their identity: a type does not count in
        comparisons of devices."""
        return (
            self.by_resource.keys() == other.by_resource.keys()
            and all(
                _are_same(offer.devices, other.by_resource[name].devices) for name, offer in self.by_resource.items()
            )
            and self.withheld == other.withheld
            and self.verdict == other.verdict
            and self.other_names == other.other_names
            and self.of_withheld_resources.keys() == other.of_withheld_resources.keys()
            and all(
                len(candidates) == len(other.of_withheld_resources[name])
                and all(map(is_, candidates, other.of_withheld_resources[name]))
                for name, candidates in self.of_withheld_resources.items()
            )
        )

    def devices(self) -> Iterator[tuple[ResourceName, OfferedDevice]]:
        """Yield every offered device with its resource."""
        for offer in self.by_resource.values():
            for device in offer.devices.values():
                yield offer.resource, device


def _are_same(now: Mapping[T, object], before: Mapping[T, object]) -> bool:
    return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))


def first_names(offers: Offers, before: Mapping[str, str]) -> Mapping[str, str]:
    """Return the first names to record: the earlier ones, and the names of resources that are offered first now."""
    found: dict[str, str] = {}
    for _, device in offers.devices():
        named = device.candidate.named
        if named.key is not None and named.first is not None and named.key not in before:
            found.setdefault(named.key, named.first)
    return {**before, **found} if found else before

"""The containers of a simulated kubelet's pods, with their requests and claims."""

from collections.abc import Mapping, Sequence

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """A device that a container has by a ResourceClaim (DRA); the kubelet's device checkpoint does not contain it."""

    driver: str
    device: str


class Container(msgspec.Struct, frozen=True):
    """A container, with the resources that it requests and the devices that it has by claims."""

    name: str
    limits: Mapping[str, int]
    init: bool = False
    claims: Sequence[Claim] = ()

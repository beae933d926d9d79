"""The containers of a simulated kubelet's pods, with their requests and claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that a container has by a ResourceClaim (DRA); the kubelet's device checkpoint does not contain it."""

    driver: str
    device: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container, with the resources that it requests and the devices that it has by claims."""

    name: str
    limits: Mapping[str, int]
    init: bool = False
    claims: Sequence[Claim] = ()

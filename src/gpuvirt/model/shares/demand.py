"""How many units of a GPU each container of a pod requests, and how many run at a time.

A whole GPU has 1000 units. Containers run in phases: init containers one after the other, each beside the sidecars that
started before it (init containers with `restartPolicy: Always`), then all app containers beside all sidecars. A pod
needs the most that any phase takes, as the kube-scheduler and the kubelet count it (KEP-753).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NewType

import msgspec

from gpuvirt.errors import GpuvirtError

Units = NewType("Units", int)
"""Thousandths of a GPU, unless a setting divides GPUs into another number."""
ContainerName = NewType("ContainerName", str)

WHOLE = Units(1000)


class UnplaceableError(GpuvirtError):
    """A container requests more units than a GPU has, but not a number of whole GPUs."""


class ContainerKind(StrEnum):
    """When a container runs."""

    INIT = "init"
    """Before the app containers, and alone but for sidecars that started earlier."""
    SIDECAR = "sidecar"
    """From its turn among the init containers on, beside all that follow."""
    APP = "app"
    """After all init containers have ended or are sidecars that run."""


class ContainerDemand(msgspec.Struct, frozen=True):
    """The units that one container requests."""

    name: ContainerName
    kind: ContainerKind
    units: Units

    def gpus(self, whole: Units) -> int:
        """Return how many whole GPUs it takes; 0 for a share of one GPU."""
        return self.units // whole if self.units >= whole else 0


class Demand(msgspec.Struct, frozen=True):
    """The units that a pod's containers request; containers without units are left out."""

    containers: tuple[ContainerDemand, ...]
    """Init containers and sidecars in their order, then app containers."""

    @property
    def total(self) -> Units:
        """The most units that run at a time, as kube-scheduler counts the pod."""
        return most_at_a_time(self, {container.name: container.units for container in self.containers})

    @property
    def largest(self) -> Units:
        """The units of the container that requests most."""
        return Units(max((container.units for container in self.containers), default=0))

    def phases(self) -> Sequence[tuple[ContainerDemand, ...]]:
        """Return the sets of containers that run at the same time, in order."""
        phases: list[tuple[ContainerDemand, ...]] = []
        sidecars: list[ContainerDemand] = []
        for container in self.containers:
            if container.kind is ContainerKind.APP:
                continue
            phases.append((*sidecars, container))
            if container.kind is ContainerKind.SIDECAR:
                sidecars.append(container)
        apps = tuple(container for container in self.containers if container.kind is ContainerKind.APP)
        return (*phases, (*sidecars, *apps))


def demand_of(containers: Sequence[ContainerDemand], whole: Units = WHOLE) -> Demand:
    """Return the demand of a pod; raises UnplaceableError for a container that no GPU can serve."""
    for container in containers:
        if container.units > whole and container.units % whole:
            raise UnplaceableError(
                f"container {container.name} requests {container.units} units, and a GPU has {whole}; expected at most"
                f" {whole}, or a multiple of it for whole GPUs"
            )
    return Demand(tuple(container for container in containers if container.units > 0))


def most_at_a_time(demand: Demand, units: Mapping[ContainerName, Units]) -> Units:
    """Return the most of `units` that run at a time, where `units` are those of some of the containers."""
    most = sidecars = apps = 0
    for container in demand.containers:
        own = units.get(container.name, 0)
        if container.kind is ContainerKind.APP:
            apps += own
        else:
            most = max(most, sidecars + own)
            sidecars += own if container.kind is ContainerKind.SIDECAR else 0
    return Units(max(most, sidecars + apps))

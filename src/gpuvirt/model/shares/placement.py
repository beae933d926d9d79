"""The GPUs of a node that a pod's containers get: the one placement of shares, for the extender and for the agent.

Packing (the default) takes the GPU with the least room that is enough, so that whole GPUs stay free; spreading takes
the one with the most room. A pod whose containers fit on one GPU together gets one, since two GPUs would be cut into
for no need.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NewType

import msgspec

from gpuvirt.model.shares.demand import WHOLE, ContainerDemand, ContainerName, Demand, Units, most_at_a_time

GpuId = NewType("GpuId", str)
"""The UUID of a GPU, as the driver shows it: `GPU-8a5c...`."""
Shares = Mapping[GpuId, Units]
Pieces = tuple[Units, ...]
"""The units that the GPUs of a node have left, the least first, whatever GPUs they are."""

MOST_TRIES = 4096
"""Arrangements of a pod's containers that are tried; a pod of eight containers on eight equal GPUs needs fewer."""


class Policy(StrEnum):
    """The choice among several GPUs, and among several nodes, for a share."""

    BINPACK = "binpack"
    """Where the least is left: whole GPUs stay free."""
    SPREAD = "spread"
    """Where the most is left: pods disturb each other least."""


class Placement(msgspec.Struct, frozen=True):
    """The GPUs of each container, with the units on each."""

    containers: Mapping[ContainerName, Shares]
    used: Shares
    """The units that the pod takes of each GPU: the most that run there at a time."""


def place(demand: Demand, free: Shares, policy: Policy = Policy.BINPACK, whole: Units = WHOLE) -> Placement | None:
    """Return where a pod's containers go, None where they do not fit.

    `free` are the units that each GPU has left. Of equal GPUs the one with the first id is taken, so that the same
    books give the same answer.
    """
    if not demand.containers:
        return Placement({}, {})
    if demand.largest < whole and (gpu := _one_gpu(demand, free, policy)) is not None:
        shares = {container.name: {gpu: container.units} for container in demand.containers}
        return Placement(shares, {gpu: demand.total})
    search = _Search(demand, free, policy, whole)
    return search.arrange(sorted(demand.containers, key=lambda container: (-container.units, container.name)), {})


def _one_gpu(demand: Demand, free: Shares, policy: Policy) -> GpuId | None:
    return next((gpu for gpu in _ordered(free, policy) if free[gpu] >= demand.total), None)


def _ordered(free: Shares, policy: Policy) -> list[GpuId]:
    sign = 1 if policy is Policy.BINPACK else -1
    return sorted(free, key=lambda gpu: (sign * free[gpu], gpu))


class _Search:
    """The search for GPUs of containers that do not fit on one GPU together."""

    def __init__(self, demand: Demand, free: Shares, policy: Policy, whole: Units) -> None:
        self._demand = demand
        self._free = free
        self._policy = policy
        self._whole = whole
        self._tries = MOST_TRIES

    def arrange(self, left: Sequence[ContainerDemand], placed: Mapping[ContainerName, Shares]) -> Placement | None:
        """Return a placement of the containers that are `left` beside those that are placed, None without one."""
        if not left:
            return Placement(placed, {gpu: units for gpu, units in self._used(placed).items() if units})
        for shares in self._choices(left[0], placed):
            self._tries -= 1
            if self._tries < 0:
                return None
            if (found := self.arrange(left[1:], {**placed, left[0].name: shares})) is not None:
                return found
        return None

    def _choices(self, container: ContainerDemand, placed: Mapping[ContainerName, Shares]) -> Iterator[Shares]:
        """Yield the GPUs that a container can have beside those that are placed, the best first."""
        if number := container.gpus(self._whole):
            fitting = [gpu for gpu in sorted(self._free) if self._fits(container, gpu, self._whole, placed)]
            if len(fitting) >= number:
                yield dict.fromkeys(fitting[:number], self._whole)
            return
        used = self._used(placed)
        room = {gpu: Units(free - used.get(gpu, 0)) for gpu, free in self._free.items()}
        equal: set[Units] = set()
        for gpu in _ordered(room, self._policy):
            if gpu not in used and room[gpu] in equal:
                continue  # as good as one that was tried: no container of this pod is on either
            if gpu not in used:
                equal.add(room[gpu])
            if self._fits(container, gpu, container.units, placed):
                yield {gpu: container.units}

    def _fits(
        self, container: ContainerDemand, gpu: GpuId, units: Units, placed: Mapping[ContainerName, Shares]
    ) -> bool:
        on_gpu = {name: shares[gpu] for name, shares in placed.items() if gpu in shares}
        return most_at_a_time(self._demand, {**on_gpu, container.name: units}) <= self._free[gpu]

    def _used(self, placed: Mapping[ContainerName, Shares]) -> Shares:
        gpus = {gpu for shares in placed.values() for gpu in shares}
        return {
            gpu: most_at_a_time(self._demand, {name: shares[gpu] for name, shares in placed.items() if gpu in shares})
            for gpu in gpus
        }

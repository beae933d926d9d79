"""How many units of a GPU each container of a pod requests, and how many run at a time.

A whole GPU has 1000 units. Containers run in phases: init containers one after the other, each beside the sidecars that
started before it (init containers with `restartPolicy: Always`), then all app containers beside all sidecars. A pod
needs the most that any phase takes, as the kube-scheduler and the kubelet count it (KEP-753).
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, localcontext
from enum import StrEnum
from typing import NewType

import msgspec

from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.model.reasons import count_of

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
                f"container {container.name} requests {count_of(container.units, 'unit')}, and a GPU has {whole};"
                f" expected at most {whole}, or a multiple of it for whole GPUs"
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


# The API server writes the shortest form of a quantity, so that 1000 units are `1k`, and 2500 are `2500`. Source:
# Kubernetes' API reference, resource.Quantity; the amount of an extended resource is an integer.
MOST = 2**63 - 1
"""The largest quantity: the API server caps larger ones."""
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,40}(?:\.\d{0,9})?|\.\d{1,9}))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?", re.ASCII
)
_DECIMAL = {suffix: Decimal(10) ** (3 * power) for power, suffix in enumerate("num kMGTPE", -3)} | {"": Decimal(1)}
_BINARY = {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)}
_FACTORS = _DECIMAL | _BINARY


class InvalidQuantityError(DamagedError):
    """A quantity that is no number, negative, or no whole number of units."""


def units_of(quantity: str | float) -> Units:
    """Return the units that a container requests; raise InvalidQuantityError."""
    text = str(quantity).strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return Units(int(text))
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidQuantityError(f"{text[:40]!r} is not a quantity; expected a whole number of units")
    number, suffix, exponent = match.groups()
    with localcontext(prec=160):  # digits enough for the longest number and the largest exponent
        units = Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _FACTORS[suffix or ""])
    if units > MOST:
        return Units(MOST)
    if units < 0 or units != units.to_integral_value():
        raise InvalidQuantityError(f"{text} is not a number of units; expected a whole number, 0 or more")
    return Units(int(units))


def is_quantity(quantity: str | int) -> bool:
    """Return whether a text is a quantity, also of something else than units: `100m`, `128Mi`."""
    return _QUANTITY.fullmatch(str(quantity)) is not None


def whole_amounts(quantities: Mapping[str, str | float]) -> dict[str, int]:
    """Return the amounts of resources by name; those that are no whole number, such as `7900m`, are left out."""
    amounts: dict[str, int] = {}
    for name, quantity in quantities.items():
        with suppress(InvalidQuantityError):
            amounts[name] = units_of(quantity)
    return amounts

"""The words for requests and pieces, the same in answers to the kube-scheduler, in events and for people."""

from collections.abc import Sequence

from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, Demand
from gpuvirt.model.shares.placement import MOST_CONTAINERS

MOST_NAMED = 8
"""How many requests a text has one by one."""


def requested_text(demand: Demand) -> str:
    """Return what a pod requests in words: `300 units`, `600 + 600 units`, `700, then 200 + 300 units`.

    Units on both sides of a plus are requested at the same time. A number that init containers request one after the
    other stands there once.
    """
    texts: dict[str, None] = {}
    sidecars: list[ContainerDemand] = []
    for container in demand.containers:
        if container.kind is ContainerKind.APP or len(texts) == MOST_NAMED:
            continue
        if container.kind is ContainerKind.SIDECAR:
            sidecars.append(container)  # it runs beside all that follow, so it is among those
        else:
            texts[_at_a_time([*sidecars, container])] = None
    last = [*sidecars, *(container for container in demand.containers if container.kind is ContainerKind.APP)]
    if last:
        texts[_at_a_time(last)] = None
    return f"{', then '.join(texts)} units"


def too_complex_text(demand: Demand) -> str:
    """Return why it is not known whether a pod fits, and how to mend it."""
    return (
        f"TooComplex: {len(demand.containers)} containers request units, which have too many arrangements on the GPUs"
        f" to try, and the first one does not fit; {simpler_text(demand)}"
    )


def simpler_text(demand: Demand) -> str:
    """Return how to mend a pod whose containers have too many arrangements."""
    number = f"at most {MOST_CONTAINERS}" if len(demand.containers) > MOST_CONTAINERS else "fewer"
    return f"use {number} containers with units, or request fewer units"


def _at_a_time(containers: Sequence[ContainerDemand]) -> str:
    if len(containers) > MOST_NAMED:
        return f"{sum(container.units for container in containers)} (by {len(containers)} containers)"
    return " + ".join(str(container.units) for container in containers)

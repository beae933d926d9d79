"""Whether a pod fits on a node by the placement itself, which judgements by sizes alone must agree with."""

from enum import StrEnum

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.shares.demand import WHOLE, Demand
from gpuvirt.model.shares.placement import place
from gpuvirt.shares.index import ClusterUsage


class Fit(StrEnum):
    """Whether a pod fits on a node."""

    FITS = "fits"
    FULL = "full"
    """Not beside the pods that are there: it could, if some of them were evicted."""
    NEVER = "never"
    """Not even on an empty node."""


def fit(usage: ClusterUsage, demand: Demand, name: NodeName) -> Fit:
    """Return whether a pod fits on a node."""
    found = usage.node(name)
    if found is None or place(demand, found.capacity, whole=WHOLE) is None:
        return Fit.NEVER
    return Fit.FITS if place(demand, found.free, whole=WHOLE) is not None else Fit.FULL

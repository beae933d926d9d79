"""The verb prioritize: a score from 0 to 10 for each node, by how well a pod fits there.

Scores have 11 levels only, and kube-scheduler adds them to those of its own plugins. So the best nodes alone get 10,
and the others at most 9 by their distance to the best: packing finds the best fit as long as other scores are close.
"""

from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from math import ceil

from gpuvirt.extender.protocol import HIGHEST_SCORE, HostPriority, NodeArguments
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.shares.demand import Demand, Units, UnplaceableError
from gpuvirt.model.shares.fitting import room_left
from gpuvirt.model.shares.nodeusage import FreeRow
from gpuvirt.model.shares.placement import Pieces, Policy
from gpuvirt.model.shares.quantities import InvalidQuantityError
from gpuvirt.model.shares.steps import Steps
from gpuvirt.shares.objects import demand_of_pod
from gpuvirt.shares.sharing import Sharing

_NODE = 2
"""The steps of a node, beside those of a search."""


def prioritized(
    asked: NodeArguments, rows: Mapping[NodeName, FreeRow], sharing: Sharing, steps: Steps
) -> Generator[None, None, Sequence[HostPriority]]:
    """Return the answer of prioritize; yield between steps.

    A node on which the pod does not fit, or where that is undecided within the `steps`, gets 0.
    """
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
    except (InvalidQuantityError, UnplaceableError):
        return [HostPriority(name, 0) for name in asked.names]
    policy = sharing.policy_of(asked.pod)
    found = [rows.get(name) for name in asked.names]
    if len(demand.containers) == 1 and demand.largest < sharing.whole:
        rooms = _rooms_beside_piece(found, demand.total, policy)
    else:
        rooms = yield from _rooms(found, demand, policy, sharing, steps)
    scores = _scores({room for room in rooms if room is not None}, policy)
    return [
        HostPriority(name, 0 if room is None else scores[room]) for name, room in zip(asked.names, rooms, strict=True)
    ]


def _rooms_beside_piece(found: Sequence[FreeRow | None], piece: Units, policy: Policy) -> Sequence[int | None]:
    """Return the room that one share leaves on its GPU: the common case, without a call for each node."""
    if policy is Policy.SPREAD:
        return [row.largest - piece if row is not None and row.largest >= piece else None for row in found]
    return [
        (pieces := row.usage.pieces)[bisect_left(pieces, piece)] - piece
        if row is not None and row.largest >= piece
        else None
        for row in found
    ]


def _rooms(
    found: Sequence[FreeRow | None], demand: Demand, policy: Policy, sharing: Sharing, steps: Steps
) -> Generator[None, None, Sequence[int | None]]:
    """Return the room that any pod leaves, None where it does not fit; equal nodes are judged once."""
    known: dict[Pieces, int | None] = {}
    rooms: list[int | None] = []
    for row in found:
        pieces = row.usage.pieces if row is not None else ()
        steps.take(_NODE)
        if pieces not in known:
            known[pieces] = room_left(demand, pieces, policy, sharing.whole, steps)
        yield
        rooms.append(known[pieces])
    return rooms


def _scores(rooms: set[int], policy: Policy) -> Mapping[int, int]:
    """Return the score for each room that a pod leaves: 10 for the best, then 9 down to 1 by distance."""
    if not rooms:
        return {}
    best = min(rooms) if policy is Policy.BINPACK else max(rooms)
    furthest = max(abs(room - best) for room in rooms) or 1
    levels = HIGHEST_SCORE - 1
    return {room: HIGHEST_SCORE - ceil(abs(room - best) * levels / furthest) for room in rooms}

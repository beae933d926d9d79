"""Whether a pod fits into the free units of a node's GPUs, and the room that it leaves.

Only the sizes of the free pieces count, not the GPUs that they are on, so that one answer serves all nodes that have
the same pieces left.
"""

from bisect import bisect_left

from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.placement import GpuId, Pieces, Policy, place
from gpuvirt.model.shares.steps import Steps


def one_piece(demand: Demand, whole: Units = WHOLE) -> Units | None:
    """Return the size of the one piece that a pod fits into if it is free; None for whole GPUs of which it needs more.

    A pod whose containers are shares may fit into several smaller pieces, too.
    """
    if demand.largest < whole or (len(demand.containers) == 1 and demand.largest == whole):
        return demand.total
    return None


def fits(demand: Demand, pieces: Pieces, whole: Units = WHOLE, steps: Steps | None = None) -> bool:
    """Return whether a pod fits into pieces, the least first; False also where that is undecided, as `steps` says."""
    if steps is not None:
        steps.begin_answer()
    if not demand.containers:
        return True
    if not pieces or pieces[-1] < min(demand.largest, whole):
        return False
    piece = one_piece(demand, whole)
    if piece is not None and pieces[-1] >= piece:
        return True
    if len(demand.containers) == 1:
        number = demand.containers[0].gpus(whole)
        return number > 0 and len(pieces) - bisect_left(pieces, whole) >= number
    return place(demand, _anonymous(pieces), whole=whole, steps=steps) is not None


def room_left(
    demand: Demand, pieces: Pieces, policy: Policy, whole: Units = WHOLE, steps: Steps | None = None
) -> int | None:
    """Return the units that stay free on the GPUs that a pod gets of these pieces; None where it does not fit.

    For whole GPUs, of which nothing stays free, the units of the whole GPUs that the node has left count. Packing takes
    the node with the least room, spreading the one with the most.
    """
    if not demand.containers:
        return 0
    piece = one_piece(demand, whole)
    if piece is not None and pieces and pieces[-1] >= piece and demand.largest < whole:
        chosen = pieces[bisect_left(pieces, piece)] if policy is Policy.BINPACK else pieces[-1]
        return chosen - piece
    if not pieces or pieces[-1] < min(demand.largest, whole):
        return None
    placed = place(demand, _anonymous(pieces), policy, whole, steps)
    if placed is None:
        return None
    used = {int(gpu): units for gpu, units in placed.used.items()}
    whole_left = sum(units for index, units in enumerate(pieces) if units >= whole and index not in used)
    left = sum(pieces[index] - units for index, units in used.items())
    return whole_left if demand.largest >= whole else left


def _anonymous(pieces: Pieces) -> dict[GpuId, Units]:
    return {GpuId(str(index)): units for index, units in enumerate(pieces)}

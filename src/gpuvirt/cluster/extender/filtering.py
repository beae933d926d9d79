"""The verb filter: which nodes a pod fits on now, and why the others are left out.

A request costs what its own names cost: a node's answer is a comparison with its largest free piece, and equal reasons
share one text, by which kube-scheduler also groups them in its event.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuvirt.cluster.extender.protocol import FilterResult, NodeArguments, filter_result
from gpuvirt.cluster.shares.objects import demand_of_pod
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION
from gpuvirt.model.shares.books import NodeBooks
from gpuvirt.model.shares.demand import Demand, UnplaceableError
from gpuvirt.model.shares.fitting import fits, one_piece
from gpuvirt.model.shares.placement import Pieces
from gpuvirt.model.shares.quantities import InvalidQuantityError
from gpuvirt.model.shares.wording import requested_text

NO_UNITS = f"the node shares no GPUs: it has no annotation {SHARED_GPUS_ANNOTATION}"


@dataclass(slots=True)
class _Refused:
    """The nodes that a pod does not fit on now, with the reasons."""

    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)


def filtered(asked: NodeArguments, nodes: Mapping[NodeName, NodeBooks], sharing: Sharing) -> FilterResult:
    """Return the answer of filter; nothing is reserved.

    A node on which evicting pods of a lower priority makes the pod fit is failed, any other unresolvable.
    """
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
    except (InvalidQuantityError, UnplaceableError) as error:
        reason = f"{sharing.resource}: {error}"
        return filter_result(asked, (), {}, dict.fromkeys(asked.names, reason))
    if not demand.containers:
        return filter_result(asked, asked.names, {}, {})
    refused = _Refused()
    fitting = _fitting(asked.names, nodes, _Judge(demand, sharing, asked.pod.spec.priority, refused))
    return filter_result(asked, fitting, refused.failed, refused.unresolvable)


def _fitting(names: Sequence[NodeName], nodes: Mapping[NodeName, NodeBooks], judge: "_Judge") -> Sequence[NodeName]:
    piece, find, has_room = judge.piece, nodes.get, judge.has_room
    fitting: list[NodeName] = []
    for name in names:
        if (books := find(name)) is None:
            judge.refused.unresolvable[name] = NO_UNITS
        elif (piece is not None and books.largest >= piece) or has_room(books.pieces):
            fitting.append(name)
        else:
            judge.refuse(name, books)
    return fitting


class _Judge:
    """The judgement of one pod; nodes with the same free pieces share it."""

    def __init__(self, demand: Demand, sharing: Sharing, priority: int, refused: _Refused) -> None:
        self._demand = demand
        self._sharing = sharing
        self._priority = priority
        self.refused = refused
        self.piece = one_piece(demand, sharing.whole)
        """The free piece that is enough; None for several whole GPUs."""
        self._texts: dict[tuple[bool, int, int], str] = {}
        self._room: dict[Pieces, bool] = {}
        is_one = len(demand.containers) == 1 and self.piece is not None
        self.has_room: Callable[[Pieces], bool] = _never if is_one else self._has_room

    def refuse(self, name: NodeName, books: NodeBooks) -> None:
        """Add a node on which the pod does not fit, with the reason."""
        capacity = books.capacity_pieces
        if not self._can_hold(capacity):
            self.refused.unresolvable[name] = self._text(capacity, is_capacity=True)
            return
        lowest = books.lowest_priority
        can_evict = lowest is not None and lowest < self._priority
        if can_evict and self._can_hold(books.pieces_without(self._priority)):
            self.refused.failed[name] = self._text(books.pieces, is_capacity=False)
        else:
            self.refused.unresolvable[name] = self._text(books.pieces, is_capacity=False)

    def _can_hold(self, pieces: Pieces) -> bool:
        if self.piece is not None and pieces and pieces[-1] >= self.piece:
            return True
        return self.has_room(pieces)

    def _has_room(self, pieces: Pieces) -> bool:
        if (room := self._room.get(pieces)) is None:
            room = self._room[pieces] = fits(self._demand, pieces, self._sharing.whole)
        return room

    def _text(self, pieces: Pieces, *, is_capacity: bool) -> str:
        largest = pieces[-1] if pieces else 0
        whole = sum(piece >= self._sharing.whole for piece in pieces) if self.piece is None else 0
        key = is_capacity, largest, whole
        if (text := self._texts.get(key)) is None:
            text = self._texts[key] = self._worded(largest, whole, is_capacity=is_capacity)
        return text

    def _worded(self, largest: int, whole: int, *, is_capacity: bool) -> str:
        sharing, demand = self._sharing, self._demand
        if demand.largest >= sharing.whole:
            count = sum(container.gpus(sharing.whole) for container in demand.containers)
            found = f"the node has {whole} whole GPUs" if is_capacity else f"{whole} whole GPUs are free"
            return f"{sharing.resource}: {demand.total} units requested, {count} of them whole GPUs; {found}"
        where = "the node's largest GPU has" if is_capacity else "the largest free piece of a GPU is"
        return f"{sharing.resource}: {requested_text(demand)} requested, {where} {largest}"


def _never(_: Pieces) -> bool:
    return False

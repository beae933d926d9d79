"""The verbs filter and prioritize: which nodes a pod fits on now, why not on the others, and how well on each.

A request costs what its own names cost: a node's answer is a comparison with its largest free piece, and equal reasons
share one text, by which kube-scheduler also groups them in its event.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from math import ceil
from types import MappingProxyType

import msgspec

from gpuvirt.extender.protocol import HIGHEST_SCORE, FilterResult, HostPriority, NodeArguments, filter_result
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.annotations import (
    LIMITS,
    LIMITS_ANNOTATION,
    REQUIRED,
    REQUIRED_ANNOTATION,
    SHARED_GPUS_ANNOTATION,
    InvalidAnnotationError,
)
from gpuvirt.model.shares.demand import Demand, InvalidQuantityError, Units, UnplaceableError
from gpuvirt.model.shares.nodeusage import FreeRow
from gpuvirt.model.shares.placement import Pieces, Policy, Steps, finished, fits, one_piece, room_left
from gpuvirt.model.shares.wording import requested_text, too_complex_text
from gpuvirt.shares.objects import demand_of_pod, needs_limits
from gpuvirt.shares.sharing import Sharing

_STEPS_OF_SCORE = 2
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
        steps.take(_STEPS_OF_SCORE)
        if pieces not in known:
            known[pieces] = room_left(demand, pieces, policy, sharing.whole, steps)
        yield
        rooms.append(known[pieces])
    return rooms


def _scores(rooms: set[int], policy: Policy) -> Mapping[int, int]:
    """Return the score for each room that a pod leaves: 10 for the best, then 9 down to 1 by distance.

    Scores have 11 levels only, and kube-scheduler adds them to those of its own plugins. So the best nodes alone get
    10, and packing finds the best fit as long as other scores are close.
    """
    if not rooms:
        return {}
    best = min(rooms) if policy is Policy.BINPACK else max(rooms)
    furthest = max(abs(room - best) for room in rooms) or 1
    levels = HIGHEST_SCORE - 1
    return {room: HIGHEST_SCORE - ceil(abs(room - best) * levels / furthest) for room in rooms}


NO_UNITS = f"the node shares no GPUs: it has no annotation {SHARED_GPUS_ANNOTATION}"

NO_LIMITS = (
    f"the pod requires enforced shares ({REQUIRED_ANNOTATION}: {REQUIRED}), but the node does not enforce shares: it"
    f" has no annotation {LIMITS_ANNOTATION}: {', '.join(LIMITS)}"
)

UPGRADING = f"{ReasonCode.DRIVER_UPGRADE}: the driver of the node is being replaced"

HELD = (
    "the missing units are held for bindings whose outcome is not known yet, since the API server did not answer;"
    " kube-scheduler tries again"
)
MOST_STEPS = 200_000
"""The steps of a request, about 0.2 s; without any left a node fits only where one GPU has room for all containers."""
_NODE = 5
"""The steps of a node, beside those of searches."""
NOMINATED = "; more is kept for pods that are nominated for the node"


NONE_KEPT: Mapping[NodeName, str] = MappingProxyType({})
_MOST_NAMED = 2
"""How many pods that wait a reason names."""


class _Judged(msgspec.Struct):
    """The nodes on which a pod fits now, and those on which it does not, with the reasons."""

    fitting: list[NodeName] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    unresolvable: dict[str, str] = msgspec.field(default_factory=dict)

    def add(self, name: NodeName, text: str) -> None:
        """Add a text to the reason of a node."""
        for reasons in (self.failed, self.unresolvable):
            if name in reasons:
                reasons[name] += text


def filtered(
    asked: NodeArguments,
    rows: Mapping[NodeName, FreeRow],
    sharing: Sharing,
    limiting: Collection[NodeName],
    nominated: Iterable[NodeName] = (),
    steps: Steps | None = None,
) -> FilterResult:
    """Return the answer of filter by work that is done at once; see `filtering`."""
    steps = steps if steps is not None else Steps(MOST_STEPS)
    return finished(filtering(asked, rows, sharing, limiting, steps, kept_texts(nominated, {})))


def filtering(
    asked: NodeArguments,
    rows: Mapping[NodeName, FreeRow],
    sharing: Sharing,
    limiting: Collection[NodeName],
    steps: Steps,
    kept: Mapping[NodeName, str] = NONE_KEPT,
) -> Generator[None, None, FilterResult]:
    """Return the answer of filter; yield between steps. Nothing is reserved.

    A node on which evicting pods of a lower priority makes the pod fit is failed, any other unresolvable. `limiting`
    are the nodes whose shares are limits. `kept` are the nodes in whose rows units are kept for other pods, with the
    texts that their reasons get for it.
    """
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
        needs = needs_limits(asked.pod, demand, sharing.whole)
    except (InvalidQuantityError, UnplaceableError, InvalidAnnotationError) as error:
        reason = f"{sharing.resource}: {error}"
        return filter_result(asked, (), {}, dict.fromkeys(asked.names, reason))
    if not demand.containers:
        return filter_result(asked, asked.names, {}, {})
    judge, piece = _Judge(demand, sharing, asked.pod.spec.priority, steps), one_piece(demand, sharing.whole)
    unlimited = dict[str, str]()
    if needs:
        unlimited = {name: NO_LIMITS for name in asked.names if name in rows and name not in limiting}
    names = [name for name in asked.names if name not in unlimited] if unlimited else asked.names
    if piece is not None and len(demand.containers) == 1:
        judged = _judged_by_piece(names, rows, judge, piece)
    else:
        judged = yield from _judged(names, rows, judge)
    judged.unresolvable |= unlimited
    for name, text in kept.items():
        if (row := rows.get(name)) is not None and judge.has_room(row.usage.capacity_pieces):
            judged.add(name, text)
        yield
    return filter_result(asked, judged.fitting, judged.failed, judged.unresolvable)


def name_upgrades(reasons: dict[str, str], upgrading: Mapping[NodeName, str]) -> None:
    """Give the nodes whose GPUs have no units while their driver is replaced this reason in place of another."""
    reasons |= {name: f"{UPGRADING} ({label})" for name, label in upgrading.items() if name in reasons}


def fits_without_held(
    asked: NodeArguments,
    rows: Mapping[NodeName, FreeRow],
    sharing: Sharing,
    limiting: Collection[NodeName],
    steps: Steps,
) -> Generator[None, None, bool]:
    """Return whether a pod fits on one of the nodes whose rows are given, which are without reservations."""
    names = [name for name in asked.names if name in rows]
    if not names:
        return False
    found = yield from filtering(NodeArguments(asked.pod, names), rows, sharing, limiting, steps)
    return bool(found.node_names)


def _judged_by_piece(
    names: Sequence[NodeName], rows: Mapping[NodeName, FreeRow], judge: "_Judge", piece: Units
) -> _Judged:
    """Judge the nodes for a pod with one container on one GPU: the common case, without a call for each node."""
    judged, find, priority = _Judged(), rows.get, judge.priority
    fitting, unresolvable = judged.fitting, judged.unresolvable
    full, small = _Texts(judge.free_text), _Texts(judge.capacity_text)
    for name in names:
        row = find(name)
        if row is None:
            unresolvable[name] = NO_UNITS
            continue
        largest, capacity, lowest, usage = row
        if largest >= piece:
            fitting.append(name)
        elif capacity < piece:
            unresolvable[name] = small[capacity]
        elif lowest >= priority or not judge.has_room(usage.pieces_without(priority)):
            unresolvable[name] = full[largest]
        else:
            judged.failed[name] = full[largest]
    return judged


def _judged(
    names: Sequence[NodeName], rows: Mapping[NodeName, FreeRow], judge: "_Judge"
) -> Generator[None, None, _Judged]:
    """Judge the nodes for any pod; nodes with the same pieces are judged once."""
    judged, priority = _Judged(), judge.priority
    for name in names:
        if (row := rows.get(name)) is None:
            judged.unresolvable[name] = NO_UNITS
            continue
        yield from judge.learn(row)
        if judge.has_room(row.usage.pieces):
            judged.fitting.append(name)
        elif not judge.has_room(row.usage.capacity_pieces):
            judged.unresolvable[name] = judge.capacity_text(row.capacity, row.usage.capacity_pieces)
        elif row.lowest_priority >= priority or not judge.has_room(row.usage.pieces_without(priority)):
            judged.unresolvable[name] = judge.free_text(row.largest, row.usage.pieces)
        else:
            judged.failed[name] = judge.free_text(row.largest, row.usage.pieces)
    return judged


def kept_texts(nominated: Iterable[NodeName], waiting: Mapping[NodeName, Sequence[str]]) -> Mapping[NodeName, str]:
    """Return what is said of nodes with nominated pods, and of those with pods that wait to be bound, by name."""
    return {**dict.fromkeys(nominated, NOMINATED), **{name: _waiting_text(names) for name, names in waiting.items()}}


def _waiting_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"; more is kept for pods that wait to be bound there: {', '.join(names[:_MOST_NAMED])}{more}"


class _Texts(dict[Units, str]):
    """Reasons by the size of the piece that they name, each worded once."""

    def __init__(self, worded: Callable[[Units], str]) -> None:
        super().__init__()
        self._worded = worded

    def __missing__(self, units: Units) -> str:
        text = self[units] = self._worded(units)
        return text


class _Judge:
    """The judgement of one pod by the sizes of pieces, each size judged once."""

    def __init__(self, demand: Demand, sharing: Sharing, priority: int, steps: Steps) -> None:
        self._demand = demand
        self._sharing = sharing
        self._steps = steps
        self._room: dict[Pieces, bool] = {}
        self._undecided: set[Pieces] = set()
        """The pieces of which it is not certain that the pod does not fit into them."""
        self._texts: dict[str, str] = {}
        self._requested, self._complex = requested_text(demand), f"{sharing.resource}: {too_complex_text(demand)}"
        self.priority = priority

    def learn(self, row: FreeRow) -> Generator[None]:
        """Judge the pieces of a node, and yield between them: each may need a search."""
        self._steps.take(_NODE)
        if not self.has_room(row.usage.pieces):
            yield
            self.has_room(row.usage.capacity_pieces)
        yield

    def has_room(self, pieces: Pieces) -> bool:
        """Return whether the pod is known to fit into pieces."""
        if (room := self._room.get(pieces)) is None:
            room = self._room[pieces] = fits(self._demand, pieces, self._sharing.whole, self._steps)
            if self._steps.is_undecided:
                self._undecided.add(pieces)
        return room

    def free_text(self, largest: Units, pieces: Pieces = ()) -> str:
        """Return why the pod does not fit on a node now."""
        if pieces in self._undecided:
            return self._complex
        return self._text(f"{self._whole(pieces)} whole GPUs are free", f"the largest free piece of a GPU is {largest}")

    def capacity_text(self, largest: Units, pieces: Pieces = ()) -> str:
        """Return why the pod does not fit on a node, whatever is evicted."""
        if pieces in self._undecided:
            return self._complex
        return self._text(f"the node has {self._whole(pieces)} of them", f"the node's largest GPU has {largest}")

    def _whole(self, pieces: Pieces) -> int:
        return sum(piece >= self._sharing.whole for piece in pieces)

    def _text(self, found_whole: str, found_piece: str) -> str:
        sharing, demand = self._sharing, self._demand
        asked = f"{sharing.resource}: {self._requested} requested"
        needs_whole = demand.largest > sharing.whole or (demand.largest == sharing.whole and len(demand.containers) > 1)
        text = f"{asked}, which are whole GPUs; {found_whole}" if needs_whole else f"{asked}, {found_piece}"
        return self._texts.setdefault(text, text)

"""The GPUs of a node that a pod's containers get: the one placement of shares, for the extender and for the agent.

Packing (the default) takes the GPU with the least room that is enough, so that whole GPUs stay free; spreading takes
the one with the most room. A pod whose containers fit on one GPU together gets one, since two GPUs would be cut into
for no need.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, NewType, TypeVar

import msgspec

from gpuvirt.model.shares.demand import WHOLE, ContainerKind, ContainerName, Demand, Units

# Anybody who may create pods can ask for units in many containers, and their arrangements on GPUs grow faster than any
# number of tries. So the work is counted, and a question whose steps have run out stays undecided. A step takes about a
# microsecond.
T = TypeVar("T")


class Steps:
    """The steps that are left for one question, or for several in turn."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.is_undecided = False
        """Whether the last answer is not certain: the pod may fit all the same."""

    def take(self, steps: int) -> None:
        """Count steps that are done; the last ones may be more than were left."""
        self.left -= steps

    def begin_answer(self) -> None:
        """Begin an answer, which is certain unless `leave_undecided` is called."""
        self.is_undecided = False

    def leave_undecided(self) -> None:
        """Note that the answer is not certain."""
        self.is_undecided = True


def finished(work: Generator[None, None, T]) -> T:
    """Return the result of work that yields wherever it may be interrupted, without an interruption."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


GpuId = NewType("GpuId", str)
"""The UUID of a GPU, as the driver shows it: `GPU-8a5c...`."""
Shares = Mapping[GpuId, Units]
Pieces = tuple[Units, ...]
"""The units that the GPUs of a node have left, the least first, whatever GPUs they are."""

MOST_CONTAINERS = 16
"""The containers with units of a pod for which arrangements are searched. A pod with more of them fits where all fit on
one GPU, or where each fits as the largest are placed first."""
MOST_STEPS = 2000
"""The steps of one search, about 2 ms: enough for nearly all pods of up to 16 containers."""
PHASES_A_STEP = 16
"""The phases of a container that a step compares."""


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


def place(
    demand: Demand, free: Shares, policy: Policy = Policy.BINPACK, whole: Units = WHOLE, steps: Steps | None = None
) -> Placement | None:
    """Return where a pod's containers go, None where they do not fit, or where that is undecided: `steps` says which.

    `free` are the units that each GPU has left. Of equal GPUs the one with the first id is taken, so that the same
    usage gives the same answer. GPUs of the same sizes give the same answer, whatever their ids are.
    """
    steps = steps if steps is not None else Steps(MOST_STEPS)
    steps.begin_answer()
    if not demand.containers:
        return Placement({}, {})
    steps.take(len(demand.containers))
    total = demand.total
    if demand.largest < whole and (gpu := _one_gpu(total, free, policy)) is not None:
        shares = {container.name: {gpu: container.units} for container in demand.containers}
        return Placement(shares, {gpu: total})
    if total > sum(free.values()):
        return None
    if steps.left <= 0:
        steps.leave_undecided()
        return None
    gpus = sorted(free, key=lambda gpu: (free[gpu], gpu))
    # Packing finds most arrangements, so it decides where spreading is undecided: filter judges nodes by packing.
    pieces = tuple(free[gpu] for gpu in gpus)
    for tried in dict.fromkeys((policy, Policy.BINPACK)):
        if (found := _Search(demand, pieces, tried, whole, steps).found()) is not None:
            containers = {name: {gpus[index]: units for index, units in own.items()} for name, own in found[0].items()}
            return Placement(containers, {gpus[index]: units for index, units in enumerate(found[1]) if units})
        if not steps.is_undecided:
            break
    return None


def _one_gpu(total: Units, free: Shares, policy: Policy) -> GpuId | None:
    sign = 1 if policy is Policy.BINPACK else -1
    return min((gpu for gpu in free if free[gpu] >= total), key=lambda gpu: (sign * free[gpu], gpu), default=None)


class _Item(NamedTuple):
    """A container, with the phases in which it runs: from `begin` up to but without `end`."""

    name: ContainerName
    units: Units
    gpus: int
    begin: int
    end: int


def _items(demand: Demand, whole: Units) -> tuple[Sequence[_Item], int]:
    """Return the containers, the largest first, and the number of phases: one for each init container, and the last."""
    last = sum(container.kind is not ContainerKind.APP for container in demand.containers)
    items, phase = list[_Item](), 0
    for container in demand.containers:
        begin, end = last, last + 1
        if container.kind is not ContainerKind.APP:
            begin, phase = phase, phase + 1
            end = last + 1 if container.kind is ContainerKind.SIDECAR else phase
        items.append(_Item(container.name, container.units, container.gpus(whole), begin, end))
    return sorted(items, key=lambda item: (-item.units, item.name)), last + 1


_Chosen = Mapping[int, Units]
"""The units of a container by the index of the piece."""


class _Search:
    """The search for GPUs of containers that do not fit on one GPU together, among pieces, the least first."""

    def __init__(self, demand: Demand, pieces: Pieces, policy: Policy, whole: Units, steps: Steps) -> None:
        self._pieces = pieces
        self._sign = 1 if policy is Policy.BINPACK else -1
        self._whole = whole
        self._steps = steps
        self._least = max(steps.left - MOST_STEPS, 0)
        """The steps that are left when this search ends without an answer."""
        self._items, self._phases = _items(demand, whole)
        self._begin()

    def found(self) -> tuple[Mapping[ContainerName, _Chosen], Sequence[Units]] | None:
        """Return the pieces of each container, and the units that are taken of each piece; None without a placement.

        `is_undecided` of the steps says whether there may be one.
        """
        self._steps.begin_answer()
        if self._first_fit():
            return self._placed, self._most
        if len(self._items) > MOST_CONTAINERS:
            self._steps.leave_undecided()
            return None
        self._begin()
        return (self._placed, self._most) if self._arrange(0) else None

    def _begin(self) -> None:
        self._used = [[0] * self._phases for _ in self._pieces]
        self._most = [Units(0)] * len(self._pieces)
        """The most units that are taken of each piece in any phase."""
        self._placed: dict[ContainerName, _Chosen] = {}

    def _first_fit(self) -> bool:
        """Place each container where it fits best, the largest first; return whether all fit: most pods that can do."""
        for item in self._items:
            if (chosen := next(self._choices(item), None)) is None:
                return False
            self._put(item, chosen)
        return True

    def _arrange(self, number: int) -> bool:
        """Place the containers from a number on; return whether they all fit."""
        if number == len(self._items):
            return True
        item = self._items[number]
        for chosen in self._choices(item):
            most = list(self._most)
            self._put(item, chosen)
            if self._arrange(number + 1):
                return True
            self._take_back(item, chosen, most)
        return False

    def _put(self, item: _Item, chosen: _Chosen) -> None:
        for index, units in chosen.items():
            used = self._used[index]
            used[item.begin : item.end] = [taken + units for taken in used[item.begin : item.end]]
            self._most[index] = Units(max(self._most[index], *used[item.begin : item.end]))
        self._placed[item.name] = chosen

    def _take_back(self, item: _Item, chosen: _Chosen, most: list[Units]) -> None:
        for index, units in chosen.items():
            used = self._used[index]
            used[item.begin : item.end] = [taken - units for taken in used[item.begin : item.end]]
        self._most = most
        del self._placed[item.name]

    def _choices(self, item: _Item) -> Iterator[_Chosen]:
        """Yield the pieces that a container can have beside those that are placed, the best first."""
        if item.gpus:
            fitting = [index for index in range(len(self._pieces)) if self._fits(item, index, self._whole)]
            if len(fitting) >= item.gpus:
                yield dict.fromkeys(fitting[: item.gpus], self._whole)
            return
        room = [piece - most for piece, most in zip(self._pieces, self._most, strict=True)]
        equal: set[int] = set()
        for index in sorted(range(len(room)), key=lambda index: (self._sign * room[index], index)):
            if not self._most[index]:
                if room[index] in equal:
                    continue  # as good as one that was tried: no container of this pod is on either
                equal.add(room[index])
            if self._fits(item, index, item.units):
                yield {index: item.units}

    def _fits(self, item: _Item, index: int, units: Units) -> bool:
        """Return whether a piece has room for units while a container runs; False once no steps are left."""
        if self._steps.left <= self._least:
            self._steps.leave_undecided()
            return False
        self._steps.take(1 + (item.end - item.begin) // PHASES_A_STEP)
        return max(self._used[index][item.begin : item.end]) + units <= self._pieces[index]


# Only the sizes of the free pieces count, not the GPUs that they are on, so that one answer serves all nodes that have
# the same pieces left.
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

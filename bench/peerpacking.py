"""Random pods that an extender places one after the other, until the first does not fit."""

from collections.abc import Sequence
from random import Random

import msgspec
from lab.cluster.api import Api

from bench.contenders import TRIES, Contender, Placing, decoded
from bench.dialects import UNITS
from bench.extenderclients import send
from bench.extenderobjects import GPUS
from bench.packing import SIZES

PACKING_NODES = 6
PACKING = f"units free when the first pod of a random trace does not fit, {PACKING_NODES} nodes x {GPUS} GPUs"
TRACE = 4
"""The number of the trace."""
Asked = tuple[tuple[str, str], int]
"""A pod's name and UID, and its units."""


class Score(msgspec.Struct, frozen=True):
    """The score of a node, as prioritize answers it."""

    host: str = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


def random_trace(gpus: int) -> Sequence[int]:
    """Return the units of more pods than fit on some GPUs."""
    random = Random(TRACE)  # noqa: S311  it makes a trace, and no secret
    return [random.choice(SIZES) for _ in range(4 * gpus)]


def free_after(contender: Contender, nodes: Sequence[str], pods: Sequence[Asked], api: Api | None = None) -> int:
    """Place pods until the first does not fit; return the units that stay free of all GPUs."""
    left = len(nodes) * GPUS * UNITS
    for (pod, uid), units in pods:
        if not _place(contender, nodes, pod, uid, units, api):
            break
        left -= units
    return left


def _place(contender: Contender, nodes: Sequence[str], pod: str, uid: str, units: int, api: Api | None) -> bool:
    for _ in range(TRIES):
        request = contender.filter(pod, uid, nodes, units)
        names = decoded(send(contender.url, [request])[1][0]).names
        if not names:
            return False
        node = best_node(contender, names, pod, uid, units)
        if not decoded(send(contender.url, [contender.bind(pod, uid, node)])[1][0]).error:
            Placing(contender, nodes, units, 0, api).unlock(node, pod)
            return True
    raise SystemExit(f"{contender.dialect.name} refused to bind {pod} {TRIES} times, although filter named a node")


def best_node(contender: Contender, names: Sequence[str], pod: str, uid: str, units: int) -> str:
    """Return the node with the highest score; the first one where the extender does not score nodes."""
    if not contender.dialect.prioritizes:
        return names[0]
    _, body = contender.filter(pod, uid, names, units)
    scores = msgspec.json.decode(send(contender.url, [("/prioritize", body)])[1][0], type=list[Score])
    return max(scores, key=lambda score: score.score).host

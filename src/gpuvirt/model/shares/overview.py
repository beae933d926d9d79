"""An overview of shared GPUs: the free units of each GPU, and the units of its pods."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.workers.away import AwayWorker

FEWEST_DIGITS = 8
"""Of the UUID of a GPU in tables: `GPU-8a5c31f2`. nvidia-smi takes any unambiguous beginning, too."""
_PREFIX = "GPU-"
NONE_AWAY: Mapping[NodeName, AwayWorker] = {}
NO_LIMITS: Mapping[NodeName, Enforcement] = {}


class PodShare(msgspec.Struct, frozen=True):
    """The units that a pod has."""

    pod: str
    """Namespace and name: `research/train-0`."""
    units: int
    enforcement: str = Enforcement.NONE
    """The enforcement for the pod's containers, by its annotation: `none`, `hami-core`, `mps` or `hami-core-mps`."""
    limit_mib: int | None = None
    """The memory that it can use by its limits; None without limits, or while its agent has not reported them."""
    used_mib: int | None = None
    """The memory that it uses by its own report; None while that is unknown, or no process has used the GPU."""


class GpuOverview(msgspec.Struct, frozen=True):
    """One shared GPU."""

    gpu: GpuId
    units: int
    """All of its units: 1000 of a whole GPU."""
    used: int
    """By the pods whose GPUs are known; more than `units` where a GPU has become smaller than its pods' shares."""
    free: int
    """The units that a pod can still get: pods whose GPUs are not known count against each GPU of their node."""
    pods: tuple[PodShare, ...]


class NodeOverview(msgspec.Struct, frozen=True):
    """The shared GPUs of one node."""

    node: NodeName
    largest: int
    """The largest piece that is free: the most that one container can get, below a whole GPU."""
    gpus: tuple[GpuOverview, ...]
    unplaced: tuple[PodShare, ...]
    """The pods of the node whose GPUs are not known: without a valid annotation."""
    away: str | None = None
    """Why no unit of the node is free now: a VgpuSchedule has suspended it. None while pods can come."""
    enforcement: str = Enforcement.NONE
    """The enforcement of new pods' shares, by the node's annotation: `none`, `hami-core`, `mps` or `hami-core-mps`."""


class SharesOverview(msgspec.Struct, frozen=True):
    """The shared GPUs of a cluster."""

    nodes: tuple[NodeOverview, ...]
    units: int
    used: int
    free: int

    @property
    def gpus(self) -> int:
        """The number of shared GPUs."""
        return sum(len(node.gpus) for node in self.nodes)

    def of_nodes(self, names: frozenset[str]) -> "SharesOverview":
        """Return the overview of some of the nodes."""
        return _total(tuple(node for node in self.nodes if node.node in names))


def overview(
    nodes: Mapping[NodeName, NodeUsage],
    pods: Mapping[PodUid, PodShare],
    away: Mapping[NodeName, AwayWorker] = NONE_AWAY,
    limiting: Mapping[NodeName, Enforcement] = NO_LIMITS,
) -> SharesOverview:
    """Return the overview of nodes; `pods` has the name and the units of each pod in the usage.

    `away` has the nodes that get no pods because of a schedule: no unit of theirs is free. `limiting` has what limits
    the shares of new pods, of the nodes on which they are limits.
    """
    found = tuple(
        _node(name, nodes[name], pods, away.get(name), limiting.get(name, Enforcement.NONE))
        for name in sorted(nodes)
        if nodes[name].capacity or nodes[name].all_pods
    )
    return _total(found)


def _total(nodes: tuple[NodeOverview, ...]) -> SharesOverview:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    return SharesOverview(
        nodes, sum(gpu.units for gpu in gpus), sum(gpu.used for gpu in gpus), sum(gpu.free for gpu in gpus)
    )


def _node(
    name: NodeName, usage: NodeUsage, pods: Mapping[PodUid, PodShare], away: AwayWorker | None, enforcement: Enforcement
) -> NodeOverview:
    ids = sorted(usage.capacity.keys() | {gpu for used in usage.pods.values() for gpu in used})
    unplaced = (pods[pod] for pod in usage.all_pods if pod not in usage.pods)
    gpus = tuple(_gpu(gpu, usage, pods) for gpu in ids)
    if away is not None:
        gpus = tuple(replace(gpu, free=0) for gpu in gpus)
    return NodeOverview(
        name,
        usage.largest if away is None else 0,
        gpus,
        tuple(sorted(unplaced, key=_by_name)),
        away.message if away is not None else None,
        enforcement,
    )


def _gpu(gpu: GpuId, usage: NodeUsage, pods: Mapping[PodUid, PodShare]) -> GpuOverview:
    shares = [replace(pods[pod], units=used[gpu]) for pod, used in usage.pods.items() if gpu in used]
    return GpuOverview(
        gpu,
        units=usage.capacity.get(gpu, 0),
        used=sum(share.units for share in shares),
        free=usage.free.get(gpu, 0),
        pods=tuple(sorted(shares, key=_by_name)),
    )


def _by_name(share: PodShare) -> str:
    return share.pod


def short_ids(gpus: Iterable[GpuId]) -> Mapping[GpuId, str]:
    """Return the shortest beginning of each id that names no other of them, of at least eight digits of the UUID."""
    ids = sorted(set(gpus))
    length = len(_PREFIX) + FEWEST_DIGITS
    longest = max(map(len, ids), default=0)
    while length < longest and len({gpu[:length] for gpu in ids}) < len(ids):
        length += 1
    return {gpu: gpu[:length].rstrip("-") for gpu in ids}

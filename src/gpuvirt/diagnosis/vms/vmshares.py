"""Why a pod's share of a GPU does not fit on a node: no GPU has that much left, though all together may have."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.diagnosis.findings import Finding, listed, of_reason, problem
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.desired.enforcement import LABEL
from gpuvirt.model.reasons import FindingCode, Reason, Seen, count_of
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, REQUIRED, REQUIRED_ANNOTATION, SHARED_GPUS_ANNOTATION
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.eviction import EvictionCandidate, victims
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.overview import PodShare
from gpuvirt.model.shares.placement import MOST_STEPS, GpuId, Steps, place
from gpuvirt.model.shares.wording import requested_text, simpler_text


class SharesSeen(msgspec.Struct, frozen=True):
    """The shared GPUs of a cluster, for a pod that requests units of them."""

    resource: str
    """The resource whose amounts are units: `nvidia.com/vgpu`."""
    demand: Demand | None
    """The pod's request for units; None where no GPU can serve it."""
    invalid: str = ""
    """Why no GPU can serve it."""
    nodes: Mapping[NodeName, NodeUsage] = msgspec.field(default_factory=dict)
    pods: Mapping[PodUid, PodShare] = msgspec.field(default_factory=dict)
    """The pods in the usage of nodes."""
    whole: Units = WHOLE
    priority: int = 0
    """The priority of the pod."""
    requires_limits: bool = False
    """Whether the pod runs only where shares are limits."""
    unconfined: Reason | None = None
    """Why no limit can hold in the pod, where it requires one."""
    limiting: frozenset[NodeName] = frozenset()
    """The nodes whose shares are limits."""


def invalid_request(subject: str, shares: SharesSeen | None) -> Finding | None:
    """Return the finding for a request that no GPU can serve, or for annotations that no node can follow."""
    if shares is not None and shares.unconfined is not None:
        return of_reason(shares.unconfined, Level.ERROR)
    if shares is None or not shares.invalid:
        return None
    return problem(
        FindingCode.INVALID_SHARE,
        subject,
        f"requests units of {shares.resource} that no GPU can have",
        (Seen("$.spec.containers", shares.invalid),),
        fix=(f"request 1 to {shares.whole} units for each container, or a multiple of {shares.whole} for whole GPUs",),
    )


def no_limits(node: str, shares: SharesSeen) -> Finding | None:
    """Return the finding for a node whose shares are no limits, where the pod requires that."""
    if not shares.requires_limits or NodeName(node) in shares.limiting:
        return None
    return problem(
        FindingCode.SHARES_NOT_ENFORCED,
        node,
        "does not enforce shares, but the pod requires enforced shares",
        (Seen(f"pod {REQUIRED_ANNOTATION}", REQUIRED), Seen.absent(f"node {node} {LIMITS_ANNOTATION}")),
        fix=(f"kubectl label node {node} --overwrite {LABEL}=hami-core", "or mps, or driver, or another node"),
    )


def pods_to_end(node: str, shares: SharesSeen) -> tuple[EvictionCandidate, ...] | None:
    """Return the pods of a node whose end makes room, none where the pod fits; None where no end makes room."""
    usage, demand = shares.nodes.get(NodeName(node)), shares.demand
    if usage is None or demand is None:
        return ()
    return victims(usage, demand, [EvictionCandidate(pod, usage.priority(pod)) for pod in usage.all_pods], shares.whole)


def no_piece(node: str, shares: SharesSeen, to_end: tuple[EvictionCandidate, ...] | None) -> Finding | None:
    """Return the finding for a node on which no GPU has the requested units left, None where the pod fits.

    `to_end` has the pods whose end makes room.
    """
    usage, demand = shares.nodes.get(NodeName(node)), shares.demand
    steps = Steps(2 * MOST_STEPS)
    if usage is None or demand is None or place(demand, usage.free, whole=shares.whole, steps=steps) is not None:
        return None
    is_undecided = steps.is_undecided
    fits_empty = place(demand, usage.capacity, whole=shares.whole, steps=steps) is not None
    if is_undecided or steps.is_undecided:
        return problem(
            FindingCode.TOO_COMPLEX,
            node,
            f"may have room for the pod, but no arrangement of its {len(demand.containers)} containers was found",
            tuple(_seen(shares, usage, gpu) for gpu in sorted(usage.capacity)),
            fix=(simpler_text(demand),),
        )
    units = requested_text(demand)
    if not fits_empty:
        largest = max(usage.capacity.values(), default=0)
        fix = f"request at most {count_of(largest, 'unit')} for a container, or use a node with larger GPUs"
        gpus = listed([f"{gpu}: {own}" for gpu, own in sorted(usage.capacity.items())])
        return problem(
            FindingCode.NO_GPU_LARGE_ENOUGH,
            node,
            f"has no GPUs with {units}; its largest has {largest}",
            (Seen(f"node {node} {SHARED_GPUS_ANNOTATION}", gpus),),
            fix=(fix if largest else f"gpuvirt why node/{node}",),
        )
    in_all = sum(usage.free.values())
    return problem(
        FindingCode.NO_FREE_PIECE,
        node,
        f"has no GPU with {units} left; the largest free piece has {usage.largest}, of {in_all} units in all",
        tuple(_seen(shares, usage, gpu) for gpu in sorted(usage.capacity)),
        fix=tuple(_ways_out(shares, demand, in_all, to_end or ())),
    )


def _ways_out(shares: SharesSeen, demand: Demand, in_all: int, chosen: tuple[EvictionCandidate, ...]) -> Iterator[str]:
    """Yield which pods must end, and, where kube-scheduler preempts none although it could, how to delete them.

    `in_all` is the number of free units of the node.
    """
    ends = [_named(shares, victim.pod) for victim in chosen]
    yield f"it fits when {listed(ends)} {'ends' if len(ends) == 1 else 'end'}; gpuvirt shares shows all GPUs"
    is_lower = all(victim.priority < shares.priority for victim in chosen)
    if is_lower and in_all >= demand.total:
        yield "kube-scheduler preempts none: the node has the units in total"
        for namespace, _, name in (end.partition("/") for end in ends):
            yield f"kubectl delete pod {name} -n {namespace}"


def _seen(shares: SharesSeen, usage: NodeUsage, gpu: GpuId) -> Seen:
    pods = [f"{_named(shares, pod)} {used[gpu]}" for pod, used in usage.pods.items() if gpu in used]
    return Seen(gpu, f"{usage.free[gpu]} of {usage.capacity[gpu]} units free; {listed(sorted(pods)) or 'no pods'}")


def _named(shares: SharesSeen, pod: PodUid) -> str:
    return shares.pods[pod].pod if pod in shares.pods else f"pod {pod}"

"""The GPUs that the containers of a pod get on their node: the final check that no GPU is overcommitted.

The extender's placement is used if it fits next to the started pods. Otherwise the agent places the pod: first it
leaves room for placed pods that have not started, then it ignores them. A wrong scheduler, an edited annotation, or two
schedulers can never allocate more units than a GPU has.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.reasons import Reason, Seen, refusals, sharing
from gpuvirt.model.reasons.nodeproblems import not_answered
from gpuvirt.model.shares.demand import WHOLE, ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.nvidiacdi import (
    FOLDERS,
    ContainerRuntime,
    NoCdiDeviceError,
    NvidiaGpu,
    NvidiaSpec,
    container_edits,
    why_no_cdi,
)
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.placement import GpuId, Placement, Policy, Shares, place


class PodOnNode(msgspec.Struct, frozen=True):
    """A pod that is bound to this node, and requests units."""

    uid: PodUid
    namespace: str
    name: str
    demand: Demand
    desired: Placement | None = None
    """The choice of its annotation, checked against the pod's requests; None without a valid one."""
    policy: Policy | None = None
    """The policy of its annotation; None: the cluster's."""
    ended: bool = False
    """Whether all its containers have ended (phase Succeeded or Failed)."""
    annotation: str | None = None
    """The text of its annotation, valid or not."""
    requires_limits: bool = False
    """Whether its containers may start only with limits of their parts of GPUs."""
    unconfined: Reason | None = None
    """Why no limit can hold in it, where it requires limits."""
    soft_memory: bool = False
    """Whether its containers may use more memory than their shares while it is free, where MPS can take it back."""


class NodeSharing(msgspec.Struct, frozen=True):
    """How GPUs are shared on this node."""

    capacity: Shares
    """The units of each GPU that can be given."""
    policy: Policy = Policy.BINPACK
    whole: Units = WHOLE
    """The units of a whole physical GPU."""
    minors: Mapping[GpuId, int] = msgspec.field(default_factory=dict)
    """The number of each GPU's device node `/dev/nvidia<minor>`, where it is known."""
    memory_mib: Mapping[GpuId, int] = msgspec.field(default_factory=dict)
    """The memory of each GPU, where shares are limits and it is known."""
    enforcement: Enforcement = Enforcement.NONE
    """The enforcement of shares in the containers of new pods."""


def offered(
    published: NodeSharing, runtime: ContainerRuntime | None, specs: Sequence[NvidiaSpec]
) -> tuple[NodeSharing, tuple[Reason, ...]]:
    """Return what containers can get of the GPUs that are to be shared, with the reasons against the others.

    Nothing is offered before the runtime is known, and no GPU that NVIDIA's CDI specs lack.
    """
    if not published.capacity:
        return published, ()
    if runtime is None:
        unknown = not_answered(
            sharing.RUNTIME,
            "is not known yet: the agent reads it from its Node, so no units are offered",
            Seen.absent("node $.status.nodeInfo.containerRuntimeVersion"),
        )
        return replace(published, capacity={}), (
            replace(unknown, fix=f"give the agent --node-name NODE, as the chart does; if it has it, {unknown.fix}"),
        )
    if (why := why_no_cdi(runtime)) is not None:
        return replace(published, capacity={}), (
            refusals.prerequisite_missing(
                sharing.RUNTIME,
                f"does not apply CDI devices ({why}), so this node offers no units of GPUs",
                "set enable_cdi = true in containerd's configuration and restart containerd, or upgrade it to 2.0 or"
                " newer",
                Seen("Node $.status.nodeInfo.containerRuntimeVersion", runtime.version or "not known yet"),
            ),
        )
    reasons: dict[GpuId, Reason] = {}
    for gpu in published.capacity:
        try:
            container_edits(specs, [NvidiaGpu(gpu, published.minors.get(gpu))])
        except NoCdiDeviceError as error:
            reasons[gpu] = sharing.no_cdi_device(gpu, FOLDERS, str(error))
    capacity = {gpu: units for gpu, units in published.capacity.items() if gpu not in reasons}
    return replace(published, capacity=capacity), tuple(reasons.values())


def choose(pod: PodOnNode, node: NodeSharing, records: ShareRecords, others: Iterable[PodOnNode]) -> Placement | None:
    """Return the GPUs of a pod that has not started, None while no GPU has room.

    `records` has the pods that have started, `others` the pods of the node as the API server has them.
    """
    usage = records.usage(node.capacity, but=(pod.uid,))
    if pod.desired is not None and _fits(pod.desired.used, usage.free):
        return pod.desired
    policy = pod.policy or node.policy
    reserved = usage
    for other in others:
        awaited = other.uid != pod.uid and other.uid not in records.pods and not other.ended
        if awaited and other.desired is not None:
            reserved = reserved.with_pod(other.uid, other.desired.used, other.demand.total)
    for free in (reserved.free, usage.free):
        if (found := place(pod.demand, free, policy, node.whole)) is not None:
            return found
    return None


def why_refused(
    units: Units, node: NodeSharing, records: ShareRecords, subject: str, kept: Mapping[str, str] = sharing.NONE_KEPT
) -> Reason | None:
    """Return why no GPU can give units to any container now, None if one can; the pod is not known yet.

    `kept` says why pods that were deleted keep their shares.
    """
    if units > node.whole and units % node.whole:
        return refusals.no_room(
            subject,
            f"requests {units} units, which are neither part of one GPU nor whole GPUs",
            f"request at most {node.whole} units, or a multiple of {node.whole}",
            Seen("units of a GPU", str(node.whole)),
        )
    free = records.usage(node.capacity).free
    demand = Demand((ContainerDemand(ContainerName(subject), ContainerKind.APP, units),))
    if place(demand, free, node.policy, node.whole) is None:
        return sharing.no_room(subject, units, {str(gpu): int(left) for gpu, left in free.items()}, kept)
    return None


def _fits(used: Shares, free: Shares) -> bool:
    return all(units <= free.get(gpu, 0) for gpu, units in used.items())

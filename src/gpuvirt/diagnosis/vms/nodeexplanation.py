"""The explanation of a node: its resources, the pods with devices that are pending there, and their obstacles."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.diagnosis.findings import Finding
from gpuvirt.diagnosis.vms.vmevidence import GpuNodeSeen, NodeSeen, ObjectKind, ObjectRef, PodSeen, VmEvidence
from gpuvirt.diagnosis.vms.vmnodes import judge_nodes
from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.workers.away import AwayWorker, NodePhase

PENDING = "Pending"


class NodeEvidence(msgspec.Struct, frozen=True):
    """The objects that the explanation of a node uses."""

    node: NodeSeen
    pods: tuple[PodSeen, ...] | None
    """All pods of the cluster that have not ended; None if they may not be listed."""
    units: str
    """The resource whose units the extender gives to pods."""
    shares: Mapping[str, SharesSeen] = msgspec.field(default_factory=dict)
    """The shared GPUs for each pending pod that requests units, `pod default/a`; none where they could not be read."""
    away: AwayWorker | None = None
    """Why the node gets no pods, if a VgpuSchedule is the cause."""
    phases: tuple[NodePhase, ...] = ()
    """The phases of VgpuSchedules that have a vGPU config for the node."""


class ResourceOfNode(msgspec.Struct, frozen=True):
    """A resource of GPUs on a node."""

    name: str
    allocatable: int
    free: int | None
    """The amount that no pod requests; None if the pods are not known."""
    reason: str
    """Why the node does not offer it, or offers none; empty if it does."""


class PendingPod(msgspec.Struct, frozen=True):
    """A pod with devices that this node could have, and that does not run."""

    namespace: str
    name: str
    requests: Mapping[str, int]
    code: str
    message: str


class NodeExplanation(msgspec.Struct, frozen=True):
    """The resources of a node, the pods that are pending there, and the reasons."""

    node: str
    ready: bool
    has_agent: bool
    """Whether the node has a GpuNode."""
    away: str | None
    """Why the node gets no pods, if a VgpuSchedule is the cause: nothing of it is free then."""
    resources: tuple[ResourceOfNode, ...]
    reasons: tuple[str, ...]
    """The reasons of its GPUs and vGPUs, each once."""
    pending: tuple[PendingPod, ...] | None
    """None if the pods may not be listed."""
    phases: tuple[str, ...] = ()
    """The vGPU configs that VgpuSchedules have for the node, and when it gets them."""
    sharing: str | None = None
    """The enforcement of new pods' shares, with its source: `hami-core (label gpuvirt.io/shares.enforcement)`."""

    @property
    def is_blocked(self) -> bool:
        """Whether anything is wrong: the node, a device, a resource, or a pod that is pending."""
        withheld = any(resource.reason for resource in self.resources)
        return not self.ready or not self.has_agent or withheld or bool(self.reasons) or bool(self.pending)


def explain_node(evidence: NodeEvidence) -> NodeExplanation:
    """Return the explanation of a node."""
    node = evidence.node
    agent = node.gpu_node or GpuNodeSeen()
    names = tuple(_names(evidence, agent))
    reasons = (
        reason if device.id in reason else f"{device.id} {reason}"
        for device in agent.devices
        for reason in device.reasons
    )
    return NodeExplanation(
        node.name,
        node.ready,
        node.gpu_node is not None,
        evidence.away.message if evidence.away is not None else None,
        tuple(_resource(evidence, agent, name) for name in names),
        tuple(dict.fromkeys(reasons)),
        None if evidence.pods is None else tuple(_pending(evidence, evidence.pods, names)),
        tuple(phase.message for phase in evidence.phases),
        agent.sharing,
    )


def _names(evidence: NodeEvidence, agent: GpuNodeSeen) -> Iterator[str]:
    """Yield the names of the GPUs' resources, without those of which the node has no device and no pod requests one.

    Without a GpuNode, each resource that the kubelet counts may be of GPUs.
    """
    node = evidence.node
    offered = {device.offered_as for device in agent.devices if device.offered_as is not None} | agent.withheld.keys()
    if agent.sharing is not None or evidence.units in node.allocatable:
        offered.add(evidence.units)
    requested = None if evidence.pods is None else {name for pod in evidence.pods for name in pod.requests}
    offered |= {
        offer.name
        for offer in agent.offers
        if offer.healthy or node.allocatable.get(offer.name) or requested is None or offer.name in requested
    }
    yield from sorted(offered if node.gpu_node is not None else node.allocatable)


def _resource(evidence: NodeEvidence, agent: GpuNodeSeen, name: str) -> ResourceOfNode:
    count = evidence.node.allocatable.get(name, 0)
    # As the scheduler computes it: the numbers of a GpuNode differ while a pod ends.
    here = (pod for pod in evidence.pods or () if pod.node == evidence.node.name)
    free = None if evidence.pods is None else max(count - sum(pod.requests.get(name, 0) for pod in here), 0)
    if evidence.away is not None:
        free = 0
    offer = next((offer for offer in agent.offers if offer.name == name), None)
    why = agent.withheld.get(name, "")
    if not why and offer is not None and not offer.registered:
        why = "the kubelet has not registered it"
    return ResourceOfNode(name, count, free, why)


def _pending(evidence: NodeEvidence, pods: Iterable[PodSeen], names: tuple[str, ...]) -> Iterator[PendingPod]:
    for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name)):
        brought = any(phase.brings(name) for phase in evidence.phases for name in pod.requests)
        wants = brought or any(name in pod.requests for name in (*names, evidence.units))
        if pod.phase == PENDING and pod.node in {"", evidence.node.name} and wants:
            yield PendingPod(pod.namespace, pod.name, pod.devices, *_why(evidence, pod))


def _why(evidence: NodeEvidence, pod: PodSeen) -> tuple[str, str]:
    """Return the code and the message of what blocks a pod on the node."""
    if pod.node:
        return "", pod.waiting or "is on the node, and its containers do not run yet"
    shares = evidence.shares.get(pod.user)
    if shares is None and evidence.units in pod.requests:
        return "", f"requests units of GPUs: gpuvirt why pod/{pod.name} -n {pod.namespace}"
    target = ObjectRef(ObjectKind.POD, pod.name, pod.namespace)
    away = {NodeName(evidence.node.name): evidence.away} if evidence.away is not None else {}
    phases = {NodeName(evidence.node.name): evidence.phases}
    found = VmEvidence(
        target=target, pod=pod, nodes=(evidence.node,), pods=evidence.pods, away=away, phases=phases, shares=shares
    )
    verdicts = judge_nodes(found)
    obstacle: Finding | None = verdicts[0].obstacle if verdicts else None
    if obstacle is None:
        return "", "could run here: devices, labels and taints fit; see the scheduler's events of the pod"
    return str(obstacle.code or ""), f"{obstacle.subject} {obstacle.message}"

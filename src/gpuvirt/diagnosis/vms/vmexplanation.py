"""Explains why a VM, a VMI or a pod lacks its GPUs (`gpuvirt why vm/NAME`) and names one blocker; explains a node."""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from gpuvirt.diagnosis.explanation import StageOutcome, StageResult, blocked, until_blocked
from gpuvirt.diagnosis.findings import Finding, listed
from gpuvirt.diagnosis.vms import vmfindings, vmshares
from gpuvirt.diagnosis.vms.vmevidence import (
    DeviceSeen,
    GpuNodeSeen,
    NodeSeen,
    ObjectKind,
    ObjectRef,
    PodSeen,
    VmEvidence,
)
from gpuvirt.diagnosis.vms.vmnodes import NodeFit, judge_nodes
from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.facts.ids import NodeName, ResourceName
from gpuvirt.kube.kinds.core import condition
from gpuvirt.kube.labels import NODE_LABEL, OPERANDS_LABEL, PRESENT_LABEL, WORKLOAD_LABEL
from gpuvirt.model.desired.workload import MODES, Workload, unknown_workload
from gpuvirt.model.reasons import ALSO
from gpuvirt.model.workers.away import AwayWorker, NodePhase

VERSION = 1
_SEEN = re.compile(r"; seen: .*?(?=; fix: |\Z)", re.DOTALL)


class VmStageName(StrEnum):
    """The stages that a VM passes until it has its devices."""

    FOUND = "found"
    REQUESTS = "requests"
    STARTED = "started"
    PERMITTED = "permitted"
    POD = "pod"
    SCHEDULED = "scheduled"
    ADMITTED = "admitted"
    RUNNING = "running"


class VmStage(msgspec.Struct, frozen=True):
    """One stage."""

    step: VmStageName
    standing: StageOutcome
    message: str


class AllocatedDevice(msgspec.Struct, frozen=True):
    """A device that is allocated to the pod."""

    id: str
    name: str
    node: str
    resource: str | None
    reasons: tuple[str, ...] = ()
    """Why the device is unhealthy."""


class Explanation(msgspec.Struct, frozen=True):
    """The explanation of a VM, a VMI or a pod; its JSON is a contract (docs/reference/json.md)."""

    target: str
    namespace: str
    pod: str | None
    requests: Mapping[str, int]
    claims: tuple[str, ...]
    """Its claims (DRA), each with the DeviceClasses that it asks for."""
    blocker: Finding | None
    """The finding that blocks it; None where it has its devices."""
    stages: tuple[VmStage, ...]
    scheduler: str
    """The pod's condition PodScheduled in words; empty where the pod is scheduled or has no such condition."""
    nodes: tuple[NodeFit, ...]
    """The nodes with GPUs, in order of how few obstacles they have; none once the pod has a node."""
    devices: tuple[AllocatedDevice, ...]
    unread: tuple[str, ...]
    """The API objects that could not be read, and why."""
    version: int = VERSION


def explain(evidence: VmEvidence) -> Explanation:
    """Return the explanation of the evidence's target."""
    pod, target = evidence.pod, evidence.target
    node = pod.node if pod is not None else ""
    is_placed = pod is not None and node != "" and pod.phase != "Failed"
    verdicts = judge_nodes(evidence) if evidence.requests and not is_placed else ()
    stages, blocker = until_blocked(_results(evidence, verdicts), VmStageName)
    scheduled = condition(pod.conditions, "PodScheduled") if pod is not None else None
    return Explanation(
        target=f"{target.kind}/{target.name}",
        namespace=target.namespace,
        pod=f"{pod.namespace}/{pod.name}" if pod is not None else None,
        requests=evidence.requests,
        claims=evidence.claimed,
        blocker=blocker,
        stages=tuple(VmStage(stage.step, stage.standing, stage.message) for stage in stages),
        scheduler=scheduled.text if scheduled is not None and scheduled.status != "True" else "",
        nodes=verdicts,
        devices=tuple(
            AllocatedDevice(device.id, device.name, node, device.offered_as, device.reasons)
            for device in devices_seen(evidence)
        ),
        unread=evidence.unread,
    )


def _results(evidence: VmEvidence, verdicts: tuple[NodeFit, ...]) -> Iterator[StageResult[VmStageName]]:
    yield _result(VmStageName.FOUND, vmfindings.not_found(evidence), f"{evidence.target.text} exists")
    yield _result(
        VmStageName.REQUESTS,
        vmfindings.outdated(evidence)
        or (
            None
            if evidence.requests or evidence.claimed
            else vmfindings.selects_workers_away(evidence) or vmfindings.no_requests(evidence)
        )
        or vmshares.invalid_request(evidence.target.text, evidence.shares),
        vmfindings.requests_text(evidence.requests, evidence.claimed),
    )
    if (kind := evidence.target.kind) in {ObjectKind.POD, ObjectKind.CLAIM}:
        for step in (VmStageName.STARTED, VmStageName.PERMITTED):
            yield StageResult(step, f"does not apply to a {kind}", skipped=True)
    else:
        phase = evidence.vmi.status.phase if evidence.vmi is not None else ""
        vmi = f"its VMI is {phase}" if phase else "it was started"
        yield _result(VmStageName.STARTED, vmfindings.not_started(evidence), vmi)
        yield _permitted(evidence)
    pod = evidence.pod
    if pod is None:
        yield _result(VmStageName.POD, vmfindings.no_pod(evidence))
        return
    yield _result(VmStageName.POD, None, pod.user)
    yield _result(VmStageName.SCHEDULED, vmfindings.not_scheduled(evidence, verdicts), f"on {pod.node}")
    yield _result(VmStageName.ADMITTED, vmfindings.not_admitted(evidence), "the node's kubelet has admitted it")
    yield _running(evidence)


def _result(step: VmStageName, blocker: Finding | None, message: str = "") -> StageResult[VmStageName]:
    return StageResult(step, message) if blocker is None else blocked(step, blocker)


def _permitted(evidence: VmEvidence) -> StageResult[VmStageName]:
    if evidence.pod is not None:
        return StageResult(VmStageName.PERMITTED, "KubeVirt has created its pod")
    blocker = vmfindings.not_permitted(evidence)
    if blocker is None and evidence.kubevirts is None:
        return StageResult(VmStageName.PERMITTED, "KubeVirt's configuration could not be read", skipped=True)
    return _result(VmStageName.PERMITTED, blocker, "KubeVirt permits the requested devices")


def _running(evidence: VmEvidence) -> StageResult[VmStageName]:
    seen = devices_seen(evidence)
    devices = ", ".join(f"{device.id} ({device.name})" for device in seen)
    message = f"it runs with {devices}" if devices else "it runs; its node has not reported its devices yet"
    if any(vmfindings.leaves_later(reason) for device in seen for reason in device.reasons):
        message += "; a change of the node's devices waits until it ends"
    blocker = vmfindings.not_running(evidence) or vmfindings.unhealthy(seen) or vmfindings.crashed(evidence)
    return _result(VmStageName.RUNNING, blocker, message)


def devices_seen(evidence: VmEvidence) -> list[DeviceSeen]:
    """Return the devices of the pod that its node's agent reports."""
    pod = evidence.pod
    if pod is None or not pod.node:
        return []
    node = next((node for node in evidence.nodes or () if node.name == pod.node), None)
    reported = node.gpu_node.devices if node is not None and node.gpu_node is not None else ()
    return [device for device in reported if pod.user in device.users]


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
    type: str | None = None
    """The vGPU type that an on-demand resource stands for; None for another resource, and where it is not known."""


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
    no_agent_because: str
    """The label, or the missing one, for which gpuvirt runs no agent there; empty if it does, or where it should."""
    away: str | None
    """Why the node gets no pods, if a VgpuSchedule is the cause: nothing of it is free then."""
    resources: tuple[ResourceOfNode, ...]
    reasons: tuple[str, ...]
    """Why it is not in its desired state, and the reasons of its GPUs and vGPUs: each once, with all its devices."""
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
        wrong = (self.no_agent_because, withheld, self.reasons, self.pending)
        return not self.ready or not self.has_agent or any(map(bool, wrong))


def explain_node(evidence: NodeEvidence) -> NodeExplanation:
    """Return the explanation of a node."""
    node = evidence.node
    agent = node.gpu_node or GpuNodeSeen()
    names = tuple(_names(evidence, agent))
    return NodeExplanation(
        node.name,
        node.ready,
        node.gpu_node is not None,
        _no_agent_because(node.labels, has_agent=node.gpu_node is not None),
        evidence.away.message if evidence.away is not None else None,
        tuple(_resource(evidence, agent, name) for name in names),
        tuple(_reasons(agent)),
        None if evidence.pods is None else tuple(_pending(evidence, evidence.pods, names)),
        tuple(phase.message for phase in evidence.phases),
        agent.sharing,
    )


def _reasons(agent: GpuNodeSeen) -> Iterator[str]:
    """Yield each reason once: devices whose reasons differ in their ids and in what was seen share one text."""
    own = [(device.id, reason) for device in agent.devices for reason in device.reasons]
    reported = [reason for _, reason in own]
    for text in agent.against:  # the condition Ready repeats reasons of devices, and of invalid values
        alone = text.partition(ALSO)[0]
        if not any(other.startswith(alone) for other in reported):
            yield text
            reported.append(text)
    groups: dict[str, list[tuple[str, str]]] = {}
    for device, reason in own:
        groups.setdefault(_SEEN.sub("", reason.replace(device, "")), []).append((device, reason))
    for group in groups.values():
        first, reason = group[0]
        also = dict.fromkeys(device for device, _ in group if device != first)
        text = reason if first in reason else f"{first} {reason}"
        yield f"{text}{ALSO}{listed(also)}" if also else text


def _no_agent_because(labels: Mapping[str, str], *, has_agent: bool) -> str:
    if labels.get(OPERANDS_LABEL) == "false" and labels.get(NODE_LABEL) != "true":
        return f"label {OPERANDS_LABEL}=false keeps gpuvirt off it (kubectl label node NODE {OPERANDS_LABEL}-)"
    if has_agent:
        return ""
    if labels.get(PRESENT_LABEL) != "true":
        return f"it has no label {PRESENT_LABEL}=true, which gpuvirt discover or NFD sets where it finds a GPU"
    workload = labels.get(WORKLOAD_LABEL)
    if workload and workload not in MODES:
        return unknown_workload(workload).reason.text
    if workload == Workload.CONTAINER:
        return f"label {WORKLOAD_LABEL}={Workload.CONTAINER} gives its GPUs to containers, without an agent"
    return ""


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
    return ResourceOfNode(name, count, free, why, agent.types.get(ResourceName(name)))


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

"""Which nodes could run a VM or pod that requests devices, and what is in the way on each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.model.doctor.findings import Finding, listed
from gpuvirt.model.doctor.vms.vmevidence import GpuNodeSeen, NodeSeen, OfferSeen, VmEvidence
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, ReasonCode, Seen, code_in
from gpuvirt.model.reasons.codes import Level

SCHEDULABLE = "kubevirt.io/schedulable"
"""The label that virt-handler keeps on nodes that can run VMs."""


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """What a node has of the requested resources, and what is in the way there."""

    node: str
    allocatable: Mapping[str, int]
    free: Mapping[str, int] | None
    """Not requested by any pod; None where the cluster's pods could not be read."""
    obstacle: Finding | None
    """None where the node could run it, as far as devices, labels and taints go."""


def judge_nodes(evidence: VmEvidence) -> tuple[NodeVerdict, ...]:
    """Return a verdict for each node that has GPUs or offers something requested, the nearest to run it first."""
    found = [_Judge(evidence, node) for node in evidence.nodes or () if _concerns(evidence, node)]
    judged = [(one.rank(), one.verdict()) for one in found]
    return tuple(verdict for _, verdict in sorted(judged, key=lambda pair: (-pair[0], pair[1].node)))


def _concerns(evidence: VmEvidence, node: NodeSeen) -> bool:
    return node.gpu_node is not None or any(node.allocatable.get(name, 0) for name in evidence.requests)


class _Judge:
    """One node, and all that speaks against it: what makes it useless first, what is easily mended last."""

    def __init__(self, evidence: VmEvidence, node: NodeSeen) -> None:
        self._evidence = evidence
        self._node = node
        self._agent = node.gpu_node or GpuNodeSeen()
        pods = evidence.pods
        self._here = None if pods is None else [one for one in pods if one.node == node.name]
        self._against = list(self._obstacles())

    def rank(self) -> int:
        """Return how near the node is to run it."""
        return len(ORDER) if not self._against else self._against[0][0]

    def verdict(self) -> NodeVerdict:
        names = self._evidence.requests
        return NodeVerdict(
            self._node.name,
            {name: self._node.allocatable.get(name, 0) for name in names},
            None if self._here is None else {name: self._free(name) for name in names},
            self._against[0][1] if self._against else None,
        )

    def _obstacles(self) -> Iterator[tuple[int, Finding]]:
        for rank, check in enumerate(ORDER):
            found = check(self)
            if found is not None:
                yield rank, found

    def _offer(self, name: str) -> OfferSeen | None:
        return next((one for one in self._agent.offers if one.name == name), None)

    def _free(self, name: str) -> int:
        return max(self._node.allocatable.get(name, 0) - sum(one.requests.get(name, 0) for one in self._here or ()), 0)

    def _missing(self) -> Iterator[tuple[str, int]]:
        """Yield the requested resources of which the node's kubelet does not count enough, with how many it counts."""
        for name, count in self._evidence.requests.items():
            counted = self._node.allocatable.get(name, 0)
            if counted < count:
                yield name, counted

    def not_offered(self) -> Finding | None:
        for name, counted in self._missing():
            offer = self._offer(name)
            if counted or name in self._agent.withheld or (offer is not None and self._has(name)):
                continue
            offered = [one.name for one in self._agent.offers if one.healthy]
            meant = nearest(name, offered)
            return self._finding(
                f"does not offer {name}{f'; did you mean {meant}?' if meant else ''}",
                FindingCode.NO_SUCH_RESOURCE,
                Seen(self._place, f"offered are: {listed(offered) or 'none'}"),
                *([f"deviceName: {meant}"] if meant else [f"gpuvirt devices, on {self._node.name}, says why not"]),
            )
        return None

    def _has(self, name: str) -> bool:
        return any(one.offered_as == name for one in self._agent.devices)

    def withheld(self) -> Finding | None:
        for name, counted in self._missing():
            why = self._agent.withheld.get(name)
            if why is not None and not counted:
                return self._finding(
                    f"does not offer {name} by the controller's order",
                    code_in(why) or FindingCode.NO_SUCH_RESOURCE,
                    Seen(f"GpuNode {self._node.name} $.spec.withheld", why),
                    f"kubectl get gpunode {self._node.name} -o yaml",
                )
        return None

    def unhealthy(self) -> Finding | None:
        for name, counted in self._missing():
            ill = [one for one in self._agent.devices if one.offered_as == name and one.reasons]
            if ill and counted + len(ill) >= self._evidence.requests[name]:
                return self._finding(
                    f"has {counted} healthy {name}, and {len(ill)} that can't be used: {ill[0].reasons[0]}",
                    code_in(ill[0].reasons[0]) or FindingCode.NOT_COUNTED,
                    Seen(self._place, listed([one.id for one in ill])),
                    f"gpuvirt why {ill[0].id}, on {self._node.name}",
                )
        return None

    def not_counted(self) -> Finding | None:
        for name, counted in self._missing():
            offer = self._offer(name)
            if offer is not None and offer.healthy >= self._evidence.requests[name]:
                state = "" if offer.registered else ", and is not registered at the kubelet"
                return self._finding(
                    f"has {offer.healthy} healthy {name}, of which its kubelet counts {counted}{state}",
                    FindingCode.NOT_COUNTED,
                    Seen(f"node {self._node.name} $.status.allocatable", f"{name}: {counted}"),
                    f"gpuvirt doctor, on {self._node.name}",
                )
        return None

    def too_few(self) -> Finding | None:
        for name, counted in self._missing():
            count = self._evidence.requests[name]
            return self._finding(
                f"has {counted} {name} in all, and {count} are requested",
                FindingCode.TOO_FEW_DEVICES,
                Seen(f"node {self._node.name} $.status.allocatable", f"{name}: {counted}"),
                f"request {counted} at most" if counted else "request another resource",
            )
        return None

    def allocated(self) -> Finding | None:
        if self._here is None:
            return None
        for name, count in self._evidence.requests.items():
            free = self._free(name)
            if free < count:
                total = self._node.allocatable.get(name, 0)
                pods = [_holder(one.namespace, one.vm, one.name) for one in self._here if one.requests.get(name)]
                return self._finding(
                    f"has {free} of {total} {name} free, and {count} {'is' if count == 1 else 'are'} requested",
                    FindingCode.ALL_ALLOCATED,
                    Seen("requested by", listed(pods)),
                    "stop a VM or pod that has one, or request another resource",
                )
        return None

    def not_ready(self) -> Finding | None:
        if self._node.ready:
            return None
        return self._finding(
            "is not Ready",
            FindingCode.NODE_NOT_READY,
            Seen(f"node {self._node.name} $.status.conditions", "Ready is not True"),
            f"kubectl describe node {self._node.name}",
        )

    def mismatched(self) -> Finding | None:
        for key, value in self._evidence.placement.node_selector.items():
            has = self._node.labels.get(key)
            if has == value:
                continue
            fix = f"kubectl label node {self._node.name} {key}={value}, or change the nodeSelector"
            if key == SCHEDULABLE:
                fix = f"see that KubeVirt's virt-handler runs on {self._node.name}: it keeps this label"
            return self._finding(
                f"does not have the label {key}={value} that the nodeSelector demands",
                FindingCode.NODE_SELECTOR_MISMATCH,
                Seen(f"node {self._node.name} $.metadata.labels", f"{key}: {has if has is not None else 'not set'}"),
                fix,
            )
        return None

    def cordoned(self) -> Finding | None:
        if not self._node.unschedulable:
            return None
        return self._finding(
            "is cordoned, so that no new pod is put there",
            FindingCode.NODE_CORDONED,
            Seen(f"node {self._node.name} $.spec.unschedulable", "true"),
            f"kubectl uncordon {self._node.name}",
        )

    def tainted(self) -> Finding | None:
        taint = self._evidence.placement.untolerated(self._node.taints)
        if taint is None:
            return None
        value = f", value: {taint.value}" if taint.value else ""
        operator = "Equal" if taint.value else "Exists"
        return self._finding(
            f"has the taint {taint.text}, which is not tolerated",
            FindingCode.TAINT_NOT_TOLERATED,
            Seen(f"node {self._node.name} $.spec.taints", taint.text),
            "# in tolerations of the VM's spec.template.spec, or of the pod's spec:",
            f"- {{key: {taint.key}, operator: {operator}{value}, effect: {taint.effect}}}",
        )

    @property
    def _place(self) -> str:
        if self._node.gpu_node is not None:
            return f"GpuNode {self._node.name} $.status"
        return f"node {self._node.name} $.status.allocatable"

    def _finding(self, message: str, code: FindingCode | ReasonCode, seen: Seen, *fix: str) -> Finding:
        return Finding(Level.ERROR, self._node.name, message, code, (seen,), fix=fix)


ORDER = (
    _Judge.not_offered,
    _Judge.withheld,
    _Judge.not_counted,
    _Judge.unhealthy,
    _Judge.too_few,
    _Judge.not_ready,
    _Judge.allocated,
    _Judge.mismatched,
    _Judge.cordoned,
    _Judge.tainted,
)
"""What can be in the way on a node: the first is the farthest from running the pod, the last the nearest."""


def _holder(namespace: str, vm: str, pod: str) -> str:
    return f"vm {namespace}/{vm}" if vm else f"pod {namespace}/{pod}"

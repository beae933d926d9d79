"""The nodes that could run a VM or pod that requests devices, and the first obstacle on each."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.diagnosis.findings import Finding, listed, of_reason, problem
from gpuvirt.diagnosis.vms import vmshares
from gpuvirt.diagnosis.vms.vmevidence import (
    GpuNodeSeen,
    NodeSeen,
    ObjectKind,
    OnDemandGpu,
    PodSeen,
    VmEvidence,
)
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.gpunode import Offered
from gpuvirt.kube.labels import driver_upgrade_in
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.offers.ondemand.typesannotation import Types
from gpuvirt.model.reasons import FindingCode, ReasonCode, Seen, code_in, count_of, sharing
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.workers.away import NodePhase


# The amounts of the requested resources on a node: counted by its kubelet, free, and in other phases.
class NodeAmounts(msgspec.Struct, frozen=True):
    """The amounts of one node."""

    requests: Mapping[str, int]
    """The amounts that the VM or pod requests, by the name of the resource."""
    counted: Mapping[str, int]
    """The amounts that the node's kubelet counts as allocatable."""
    pods: Sequence[PodSeen] | None
    """The pods of the node; None where the cluster's pods could not be read."""
    phases: Sequence[NodePhase]
    """The phases of schedules that change the node's resources."""
    on_demand: Sequence[OnDemandGpu]

    def allocatable(self, name: str) -> int:
        """Return how many devices of a resource the node's kubelet counts."""
        return self.counted.get(name, 0)

    def free(self, name: str) -> int:
        """Return how many devices of a resource no pod requests."""
        requested = sum(pod.requests.get(name, 0) for pod in self.pods or ())
        return max(self.allocatable(name) - requested, 0)

    def fewest_ends(self) -> int:
        """Return how many pods have to end so that each requested resource is free, at the least."""
        most = 0
        for name, count in self.requests.items():
            free, number = self.free(name), 0
            for used in sorted((pod.requests.get(name, 0) for pod in self.pods or ()), reverse=True):
                if free >= count:
                    break
                free, number = free + used, number + 1
            most = max(most, number)
        return most

    def missing(self) -> Iterator[tuple[str, int]]:
        """Yield the requested resources of which the node's kubelet counts too few devices, with its count."""
        for name, count in self.requests.items():
            counted = self.allocatable(name)
            if counted < count and self.phase_of(name) is None and not self.gpus_to_free(name):
                yield name, counted

    def gpus_to_free(self, name: str) -> Sequence[OnDemandGpu]:
        """Return the GPUs in mode on-demand that offer a resource once their users have ended, by how many users.

        There are none where the kubelet counts enough, or where their end is not enough.
        """
        if self.allocatable(name) >= self.requests[name]:
            return ()
        able = sorted((gpu for gpu in self.on_demand if name in gpu.resources), key=lambda gpu: len(gpu.users))
        return able if self.missing_of(name) <= len(able) else ()

    def missing_of(self, name: str) -> int:
        """Return how many more devices of a resource are requested than are free."""
        return self.requests[name] - self.free(name)

    def phase_of(self, name: str) -> NodePhase | None:
        """Return the phase in which the node offers a resource that it does not offer now."""
        if self.allocatable(name):
            return None
        return next((phase for phase in self.phases if phase.brings(name)), None)


def pods_by_node(pods: Iterable[PodSeen]) -> Mapping[str, Sequence[PodSeen]]:
    """Return the pods by the node that they are bound to."""
    by_node: dict[str, list[PodSeen]] = {}
    for pod in pods:
        by_node.setdefault(pod.node, []).append(pod)
    return by_node


OF_AWAY = frozenset(f"node.kubernetes.io/{name}" for name in ("unreachable", "not-ready", "unschedulable"))
"""The taints that Kubernetes sets on a node that is cordoned, or whose VM is suspended."""
SCHEDULABLE = "kubevirt.io/schedulable"
"""The label that virt-handler keeps on nodes that can run VMs."""

KATA = "katacontainers.io/kata-runtime"
"""The label that kata-deploy sets on nodes with Kata's runtimes. Without these, a pod with a label alone hangs."""


class NodeFit(msgspec.Struct, frozen=True):
    """A node's amounts of the requested resources, and its first obstacle."""

    node: str
    allocatable: Mapping[str, int]
    free: Mapping[str, int] | None
    """The amounts that no pod requests; None where the cluster's pods could not be read."""
    obstacle: Finding | None
    """None where devices, labels and taints would let the node run it."""
    types: Types = msgspec.field(default_factory=dict)
    """The types that the node's on-demand resources stand for."""


def judge_nodes(evidence: VmEvidence) -> tuple[NodeFit, ...]:
    """Return a verdict for each node that has GPUs or a requested resource, in order of how easily it could run it."""
    pods = None if evidence.pods is None else pods_by_node(evidence.pods)
    judges = [
        _Judge(evidence, node, None if pods is None else pods.get(node.name, ()))
        for node in evidence.nodes or ()
        if node.gpu_node is not None or any(node.allocatable.get(name, 0) for name in evidence.requests)
    ]
    return tuple(judge.verdict() for judge in sorted(judges, key=_Judge.order))


def meant(evidence: VmEvidence, name: str, offered: Sequence[str]) -> tuple[str, str]:
    """Return the end of a sentence about a resource that is not offered, and what to write; empty without a guess.

    A name with another number is another size, and no slip.
    """
    if evidence.shares is not None and name == evidence.shares.resource:
        return "", "kubectl label node NODE --overwrite nvidia.com/gpu.workload.config=shared"
    near = nearest(name, offered)
    if near is None or re.sub(r"\d+", "", near) == re.sub(r"\d+", "", name):
        return "", ""
    field = "resources.limits" if evidence.target.kind is ObjectKind.POD else "deviceName"
    return f"; did you mean {near}?", f"{field}: {near}"


class _Judge:
    """The obstacles of one node: those that make it useless first, those that are easy to remove last."""

    def __init__(self, evidence: VmEvidence, node: NodeSeen, here: Sequence[PodSeen] | None) -> None:
        """`here` has the pods of the node; None where the cluster's pods could not be read."""
        self._evidence = evidence
        self._node = node
        self._agent = node.gpu_node or GpuNodeSeen()
        self._here = here
        phases = evidence.phases.get(NodeName(node.name), ())
        self._amounts = NodeAmounts(evidence.requests, node.allocatable, here, phases, self._agent.on_demand)
        self._away = evidence.away.get(NodeName(node.name))
        shares = evidence.shares
        self._to_end = vmshares.pods_to_end(node.name, shares) if shares is not None else ()
        self._against = list(self._obstacles())

    def order(self) -> tuple[int, int, int, int, str]:
        """Return how easily the node could run it, less is easier.

        The first obstacle decides, then how many obstacles remain once pods have ended, then the pods that have to end:
        those of a higher priority, and how many.
        """
        ranks = [rank for rank, _ in self._against]
        first = ranks[0] if ranks else len(ORDER)
        remain = sum(ORDER[rank] not in {_Judge.no_piece, _Judge.other_type, _Judge.allocated} for rank in ranks)
        own = self._evidence.shares.priority if self._evidence.shares is not None else 0
        ends = self._to_end or ()
        return (
            -first,
            remain,
            sum(pod.priority > own for pod in ends),
            len(ends) or self._amounts.fewest_ends(),
            self._node.name,
        )

    def verdict(self) -> NodeFit:
        names = self._evidence.requests
        return NodeFit(
            self._node.name,
            {name: self._amounts.allocatable(name) for name in names},
            None if self._here is None else {name: self._amounts.free(name) for name in names},
            self._against[0][1] if self._against else None,
            {name: vgpu_type for name, vgpu_type in self._agent.types.items() if name in names},
        )

    def _obstacles(self) -> Iterator[tuple[int, Finding]]:
        for rank, check in enumerate(ORDER):
            found = check(self)
            if found is not None:
                yield rank, found

    def _offer(self, name: str) -> Offered | None:
        return next((offer for offer in self._agent.offers if offer.name == name), None)

    def not_offered(self) -> Finding | None:
        for name, counted in self._amounts.missing():
            offer = self._offer(name)
            has = any(device.offered_as == name for device in self._agent.devices)
            if counted or name in self._agent.withheld or (offer is not None and has):
                continue
            offered = [other.name for other in self._agent.offers if other.healthy]
            guess, fix = meant(self._evidence, name, offered)
            return self._finding(
                f"does not offer {name}{guess}",
                FindingCode.NO_SUCH_RESOURCE,
                Seen(self._place, f"offers {listed(offered) or 'no resource'}"),
                fix or f"gpuvirt devices, on {self._node.name}, shows why not",
            )
        return None

    def withheld(self) -> Finding | None:
        for name, counted in self._amounts.missing():
            why = self._agent.withheld.get(name)
            if why is not None and not counted:
                return self._finding(
                    f"does not offer {name}, because the controller withholds it",
                    code_in(why) or FindingCode.NO_SUCH_RESOURCE,
                    Seen(f"GpuNode {self._node.name} $.spec.withheld", why),
                    f"kubectl get gpunode {self._node.name} -o yaml",
                )
        return None

    def unhealthy(self) -> Finding | None:
        for name, counted in self._amounts.missing():
            unhealthy = [device for device in self._agent.devices if device.offered_as == name and device.reasons]
            if unhealthy and counted + len(unhealthy) >= self._evidence.requests[name]:
                return self._finding(
                    f"has {counted} healthy {name}, and {len(unhealthy)} unhealthy: {unhealthy[0].reasons[0]}",
                    code_in(unhealthy[0].reasons[0]) or FindingCode.NOT_COUNTED,
                    Seen(self._place, listed([device.id for device in unhealthy])),
                    f"gpuvirt why {unhealthy[0].id}, on {self._node.name}",
                )
        return None

    def not_counted(self) -> Finding | None:
        for name, counted in self._amounts.missing():
            offer = self._offer(name)
            if offer is not None and offer.healthy >= self._evidence.requests[name]:
                state = "" if offer.registered else ", and is not registered at the kubelet"
                return self._finding(
                    f"has {offer.healthy} healthy {name}, but its kubelet counts {counted}{state}",
                    FindingCode.NOT_COUNTED,
                    Seen(f"node {self._node.name} $.status.allocatable", f"{name}: {counted}"),
                    f"gpuvirt doctor, on {self._node.name}",
                )
        return None

    def too_few(self) -> Finding | None:
        for name, counted in self._amounts.missing():
            count = self._evidence.requests[name]
            idle = [device for device in self._agent.devices if device.reasons and device.offered_as in {None, name}]
            without = idle if not counted else []
            return problem(
                FindingCode.TOO_FEW_DEVICES,
                self._node.name,
                f"has {counted} {name} in all, but {count} {'is' if count == 1 else 'are'} requested",
                (
                    Seen(f"node {self._node.name} $.status.allocatable", f"{name}: {counted}"),
                    *(Seen(f"not offered: {device.id}", device.reasons[0]) for device in without[:3]),
                ),
                fix=(
                    f"request at most {counted}" if counted else "request another resource",
                    *(f"gpuvirt why {device.id}, on {self._node.name}" for device in without[:1]),
                ),
            )
        return None

    def invalid_share(self) -> Finding | None:
        return vmshares.invalid_request(self._evidence.target.text, self._evidence.shares)

    def driver_upgrade(self) -> Finding | None:
        """The obstacle of a node whose driver is being replaced, for a pod that requests units."""
        label, shares = driver_upgrade_in(self._node.labels), self._evidence.shares
        if shares is None or not label:
            return None
        usage = shares.nodes.get(NodeName(self._node.name))
        sharers = [shares.pods[pod].pod for pod in usage.all_pods if pod in shares.pods] if usage is not None else []
        return of_reason(sharing.driver_upgrade(label, sharers), Level.ERROR)

    def no_limits(self) -> Finding | None:
        shares = self._evidence.shares
        return vmshares.no_limits(self._node.name, shares) if shares is not None else None

    def no_piece(self) -> Finding | None:
        shares = self._evidence.shares
        return vmshares.no_piece(self._node.name, shares, self._to_end) if shares is not None else None

    def other_type(self) -> Finding | None:
        """The obstacle of GPUs in mode on-demand that carry vGPUs of another type: it passes with their users."""
        for name, count in self._evidence.requests.items():
            if not (gpus := self._amounts.gpus_to_free(name)):
                continue
            fewest = gpus[: self._amounts.missing_of(name)]
            users = list(dict.fromkeys(user for gpu in fewest for user in gpu.users))
            others = ", or the users of another of these GPUs" if len(fewest) < len(gpus) else ""
            return problem(
                FindingCode.ALL_ALLOCATED,
                self._node.name,
                f"has {self._amounts.allocatable(name)} {name} in all, but {count} {'is' if count == 1 else 'are'}"
                f" requested: {count_of(len(gpus), 'GPU')} in mode on-demand {'carries' if len(gpus) == 1 else 'carry'}"
                " vGPUs of another size",
                tuple(Seen(gpu.id, f"vGPUs of {listed(gpu.users)}") for gpu in gpus),
                fix=(f"it fits when {listed(users)} {'ends' if len(users) == 1 else 'end'}{others}",),
            )
        return None

    def allocated(self) -> Finding | None:
        if self._here is None:
            return None
        for name, count in self._evidence.requests.items():
            free = self._amounts.free(name)
            if free < count and self._amounts.phase_of(name) is None and not self._amounts.gpus_to_free(name):
                total = self._amounts.allocatable(name)
                pods = [
                    f"vm {pod.namespace}/{pod.vm}" if pod.vm else pod.user
                    for pod in self._here
                    if pod.requests.get(name)
                ]
                return self._finding(
                    f"has {free} of {total} {name} free, but {count} {'is' if count == 1 else 'are'} requested",
                    FindingCode.ALL_ALLOCATED,
                    Seen("requested by", listed(pods)),
                    "stop a VM or pod that uses one, or request another resource",
                )
        return None

    def not_ready(self) -> Finding | None:
        if self._node.ready or self._away is not None:
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
                fix = f"check that KubeVirt's virt-handler runs on {self._node.name}: it sets this label"
            elif key == KATA:
                fix = f"install kata-deploy on {self._node.name}, which sets this label (docs/kata.md)"
            return self._finding(
                f"does not have the label {key}={value} that the nodeSelector requires",
                FindingCode.NODE_SELECTOR_MISMATCH,
                Seen(f"node {self._node.name} $.metadata.labels", f"{key}: {has if has is not None else 'not set'}"),
                fix,
            )
        return None

    def cordoned(self) -> Finding | None:
        if not self._node.unschedulable or self._away is not None:
            return None
        return self._finding(
            "is cordoned, so the scheduler places no new pod on it",
            FindingCode.NODE_CORDONED,
            Seen(f"node {self._node.name} $.spec.unschedulable", "true"),
            f"kubectl uncordon {self._node.name}",
        )

    def tainted(self) -> Finding | None:
        taints = (taint for taint in self._node.taints if self._away is None or taint.key not in OF_AWAY)
        taint = self._evidence.placement.untolerated(taints)
        if taint is None:
            return None
        value = f", value: {taint.value}" if taint.value else ""
        operator = "Equal" if taint.value else "Exists"
        return self._finding(
            f"has the taint {taint.text}, which the pod does not tolerate",
            FindingCode.TAINT_NOT_TOLERATED,
            Seen(f"node {self._node.name} $.spec.taints", taint.text),
            "# in tolerations of the VM's spec.template.spec or of the pod's spec:",
            f"- {{key: {taint.key}, operator: {operator}{value}, effect: {taint.effect}}}",
        )

    def away(self) -> Finding | None:
        """The obstacle of a worker that passes by itself: its node is not Ready, cordoned and tainted meanwhile."""
        if self._away is None:
            return None
        return self._finding(
            self._away.message,
            FindingCode.WORKER_AWAY,
            Seen(f"VgpuSchedule {self._away.schedule} $.status.workers", self._node.name),
            self._away.command,
        )

    def other_phase(self) -> Finding | None:
        """The obstacle of a node that offers the resource in another phase."""
        for phase in filter(None, map(self._amounts.phase_of, self._evidence.requests)):
            seen = Seen(f"VgpuSchedule {phase.config.schedule} $.spec.phases", phase.config.phase)
            return self._finding(phase.message, FindingCode.OTHER_PHASE, seen, phase.command)
        return None

    @property
    def _place(self) -> str:
        if self._node.gpu_node is not None:
            return f"GpuNode {self._node.name} $.status"
        return f"node {self._node.name} $.status.allocatable"

    def _finding(self, message: str, code: FindingCode | ReasonCode, seen: Seen, *fix: str) -> Finding:
        return Finding(Level.ERROR, self._node.name, message, code, (seen,), fix=fix)


ORDER = (
    _Judge.invalid_share,
    _Judge.driver_upgrade,
    _Judge.not_offered,
    _Judge.withheld,
    _Judge.not_counted,
    _Judge.unhealthy,
    _Judge.too_few,
    _Judge.no_limits,
    _Judge.not_ready,
    _Judge.no_piece,
    _Judge.other_type,
    _Judge.allocated,
    _Judge.mismatched,
    _Judge.cordoned,
    _Judge.tainted,
    _Judge.other_phase,
    _Judge.away,
)
"""The obstacles, from the hardest to remove to the easiest."""

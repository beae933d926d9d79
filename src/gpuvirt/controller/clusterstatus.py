"""The state of a cluster's GPU nodes, read once from the API server for `gpuvirt status`: each component of each node.

The components are those that NVIDIA's operator runs as pods. On nodes for VMs most of them are parts of the node agent,
which reports their states in the GpuNode; the others are pods.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.announcer import DRAINING, LEFT_ALONE
from gpuvirt.controller.deployment import StoredObject
from gpuvirt.controller.nodes.placement import Defaults, leaving, placement_of
from gpuvirt.controller.nodes.problems import Deployer, NodeProblem, ObservedNode, problems_of
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.picture import NO_PODS, pods_by_node
from gpuvirt.controller.policy import policies
from gpuvirt.controller.policy import status as policy_status
from gpuvirt.controller.policy.policies import InvalidValue, of_node
from gpuvirt.facts.ids import Namespace, parse_namespace
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import CONTROLLER_LEASE, UNINSTALL, Lease, leases
from gpuvirt.kube.events import EVENTS, EventLevel, SeenEvent, newest
from gpuvirt.kube.failures import ApiError, ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, Choice, ClusterPolicy, StoredPolicy, choose
from gpuvirt.kube.kinds.core import Node, Pod
from gpuvirt.kube.kinds.gpunode import GPU_NODES, READY, GpuNode, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.labels import (
    AGENT,
    DEPLOY,
    DRIVER,
    OPERAND_LABEL,
    OPERANDS_LABEL,
    OPERANDS_OFF_ANNOTATION,
    PRESENT_LABEL,
    TOOLKIT,
    VFIO_MANAGER,
    VGPU_DEVICE_MANAGER,
    VGPU_DRIVER,
    WORKLOAD_LABEL,
    deploy_label,
)
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Metadata, Resource, daemon_sets, pods
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.reasons import Reason, ReasonCode, count_of

PLUGIN, VALIDATOR, VFIO, VGPU_DEVICE_MANAGER_COMPONENT = (
    "sandbox-device-plugin",
    "sandbox-validator",
    "vfio-manager",
    "vgpu-device-manager",
)
SHARED_GPUS, ON_DEMAND_VGPUS, CLAIMED_GPUS = "shared-gpus", "on-demand-vgpus", "claimed-gpus"
CHANGERS: Mapping[str, str] = {
    Workload.PASSTHROUGH: VFIO,
    Workload.VGPU: VGPU_DEVICE_MANAGER_COMPONENT,
    Workload.SHARED: SHARED_GPUS,
    Workload.ON_DEMAND: ON_DEMAND_VGPUS,
    Workload.CLAIMS: CLAIMED_GPUS,
}
"""The component that stands for the agent's changes of GPUs, by workload."""
_AGENT_WORKLOADS = CHANGERS.keys()
_OPERANDS_OF = (
    (Workload.VGPU, (VGPU_DEVICE_MANAGER,)),
    (Workload.PASSTHROUGH, (VFIO_MANAGER,)),
    (Workload.CONTAINER, (DRIVER,)),
    (Workload.SHARED, (AGENT, TOOLKIT)),
    (Workload.ON_DEMAND, (AGENT, VGPU_DRIVER)),
    (Workload.CLAIMS, (AGENT,)),
)
"""The operands that no workload before this one has."""
PODS: Mapping[str, str] = {
    OperandName.VGPU_MANAGER: "vgpu-manager",
    OperandName.MPS: "mps-daemon",
    OperandName.DRIVER: "driver",
    OperandName.TOOLKIT: "container-toolkit",
    OperandName.VALIDATOR: "operator-validator",
    OperandName.DEVICE_PLUGIN: "device-plugin",
    OperandName.DCGM: "dcgm",
    OperandName.DCGM_EXPORTER: "dcgm-exporter",
    OperandName.GFD: "gpu-feature-discovery",
}
RUNNING, OFF = "Running", "Off"
ALL_OPERANDS = "operands"
"""The component that stands for all components of a node: switched off, left alone, or waiting for users of GPUs."""
NO_CAUSES: Mapping[str, str] = MappingProxyType({})
CHECKS = ("VfioPciReady", "VgpuManagerReady", "VgpuDevicesReady")


class Row(msgspec.Struct, frozen=True):
    """One component on one node."""

    node: str
    workload: str
    """The node's workload by its deployed operands; `-` without operands."""
    component: str
    ready: bool
    state: str
    """`Running`, or a reason's code."""
    detail: str = ""


def rows(
    nodes: Iterable[Node],
    gpu_nodes: Mapping[str, GpuNode],
    pods: Sequence[Pod],
    deployer: Deployer | None = None,
    causes: Mapping[str, str] = NO_CAUSES,
) -> tuple[Row, ...]:
    """Return the components of all nodes with GPUs, by node; without a ClusterPolicy none counts as missing.

    `causes`: what events say about pods that are not ready, by uid.
    """
    by_node: dict[str, list[Pod]] = {}
    for pod in pods:
        by_node.setdefault(pod.spec.node_name, []).append(pod)
    of_nodes, found = pods_by_node(pods), list[Row]()
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        name = node.metadata.name
        if node.metadata.labels.get(PRESENT_LABEL) == "true":
            gpu_node = gpu_nodes.get(name)
            observed = _observed(node, gpu_node, of_nodes.get(name, NO_PODS).apps, deployer)
            problems = problems_of(observed, deployer) if deployer else ()
            found += _rows_of(node, gpu_node, observed, problems, by_node.get(name, ()), causes)
    return tuple(found)


def _observed(node: Node, gpu_node: GpuNode | None, apps: frozenset[str], deployer: Deployer | None) -> ObservedNode:
    labels = node.metadata.labels
    defaults = policies.defaults_of(deployer.policy) if deployer is not None else Defaults(sandboxed=True)
    resources = frozenset[str]() if deployer is None or deployer.beside else node.resources
    placement = placement_of(labels, gpu_node, defaults, resources)
    if deployer is not None:  # without a policy, no node becomes anything else
        placement = leaving(placement, labels, gpu_node, spec_is_due=False)
    return ObservedNode(labels, placement, gpu_node, apps, node.resources)


def _rows_of(
    node: Node,
    gpu_node: GpuNode | None,
    observed: ObservedNode,
    problems: Sequence[NodeProblem],
    pods: Sequence[Pod],
    causes: Mapping[str, str],
) -> Iterator[Row]:
    name, workload = node.metadata.name, _workload(node.metadata.labels)
    if observed.placement.operands_off:
        yield Row(name, workload, ALL_OPERANDS, ready=True, state=OFF, detail=f"label {OPERANDS_LABEL}=false")
        return
    if (why := observed.placement.left_alone) is not None:
        yield Row(name, workload, ALL_OPERANDS, ready=True, state=LEFT_ALONE, detail=why)
    if (waits := observed.placement.waits) is not None:
        yield Row(name, workload, ALL_OPERANDS, ready=False, state=DRAINING, detail=waits)
    of_agent = next((problem.reason for problem in problems if problem.component == AGENT), None)
    has_agent = workload in _AGENT_WORKLOADS
    if has_agent:
        yield from _agent_rows(node, workload, gpu_node, of_agent)
    for problem in problems:
        if problem.component != AGENT or not has_agent:
            state, detail = str(problem.reason.code), _detail(problem.reason)
            yield Row(name, workload, problem.component, ready=False, state=state, detail=detail)
    yield from _pod_rows(name, workload, pods, causes)


def _detail(reason: Reason) -> str:
    """Return a reason's text without the code, which has a column of its own."""
    return reason.text.removeprefix(f"{reason.code}: ")


def _workload(labels: Mapping[str, str]) -> str:
    """Return the workload that a node's operands serve now; a changed label may not have taken effect yet."""
    deploys = {key for key, value in labels.items() if key.startswith(DEPLOY) and value != "false"}
    for workload, operands in _OPERANDS_OF:
        if deploys.issuperset(map(deploy_label, operands)):
            return str(workload)
    return labels.get(WORKLOAD_LABEL, "-")


def _agent_rows(node: Node, workload: str, gpu_node: GpuNode | None, problem: Reason | None) -> Iterator[Row]:
    name, status = node.metadata.name, gpu_node.status if gpu_node is not None else None
    changer = CHANGERS[workload]
    checks = () if workload in {Workload.SHARED, Workload.CLAIMS} else (VALIDATOR,)
    if status is None or problem is not None:
        # The report of an agent that no longer runs may be outdated.
        state = str(problem.code) if problem is not None else "NotReported"
        detail = (
            _detail(problem)
            if problem is not None
            else "the node agent has not reported yet; see the log of its pod if this lasts"
        )
        for component in (PLUGIN, *checks, changer):
            yield Row(name, workload, component, ready=False, state=state, detail=detail)
        return
    yield _plugin(name, workload, status)
    failed = [condition for condition in status.conditions if condition.type in CHECKS and condition.status != "True"]
    state, why = _first(failed)
    for component in checks:
        yield Row(name, workload, component, ready=not failed, state=state, detail=why)
    unready = [condition for condition in status.conditions if condition.type == READY and condition.status != "True"]
    done = f"{count_of(status.totals.gpus, 'GPU')}, {status.totals.modes or 'no'} mode"
    if workload == Workload.VGPU:
        # The config that the agent applies, which differs from the label if that is invalid or overridden.
        configs = sorted({gpu.vgpu_config for gpu in status.gpus if gpu.vgpu_config is not None})
        done = f"{count_of(status.totals.vgpus, 'vGPU')}, config {', '.join(configs) or 'none'}"
    elif workload == Workload.ON_DEMAND:
        done = f"{count_of(status.totals.gpus, 'GPU')}, {count_of(status.totals.vgpus, 'vGPU')} of pods"
    state, why = _first(unready)
    yield Row(name, workload, changer, ready=not unready, state=state, detail=why or done)


def _plugin(name: str, workload: str, status: Status) -> Row:
    offered = ", ".join(
        f"{resource.healthy} {resource.name}" + (f" ({resource.allocated} allocated)" if resource.allocated else "")
        for resource in status.resources
        if resource.healthy or resource.allocated
    )
    shared = [gpu.units for gpu in status.gpus if gpu.units is not None]
    units = f"{sum(shared)} units of {count_of(len(shared), 'GPU')}" if shared else ""
    offered = ", ".join(filter(None, (offered, units)))
    unregistered = [resource.name for resource in status.resources if not resource.registered and resource.healthy]
    if unregistered:
        detail = f"not registered with the kubelet: {', '.join(unregistered)}"
        return Row(name, workload, PLUGIN, ready=False, state="NotRegistered", detail=detail)
    return Row(name, workload, PLUGIN, ready=True, state=RUNNING, detail=offered or "no devices to offer")


def _pod_rows(node: str, workload: str, pods: Iterable[Pod], causes: Mapping[str, str]) -> Iterator[Row]:
    for pod in sorted(pods, key=lambda pod: pod.metadata.name):
        component, ready = PODS.get(pod.app), pod.status.ready
        if pod.app == OperandName.AGENT and workload in _AGENT_WORKLOADS and not ready:
            component = OperandName.AGENT.value  # a ready agent has only the rows of its parts
        if component is not None:
            state, why = (RUNNING, "") if ready else (pod.status.phase or "Unknown", _why_unready(pod, causes))
            yield Row(node, workload, component, ready=ready, state=state, detail=why)


def _why_unready(pod: Pod, causes: Mapping[str, str]) -> str:
    """Return the kubelet's reason, or what an event says, or how to find out: a driver may take minutes to build."""
    named, init = f"{pod.metadata.name} -n {pod.metadata.namespace}", pod.status.initializing
    return (
        pod.status.waiting_reason
        or (init and f"waits for its init container {init}; see kubectl logs {named} -c {init}")
        or causes.get(pod.metadata.uid, "")
        or f"no warning says why; see kubectl describe pod {named}, and kubectl logs {named} --all-containers"
    )


def _first(failed: Sequence[Condition]) -> tuple[str, str]:
    if not failed:
        return RUNNING, ""
    return failed[0].reason, failed[0].message.removeprefix(f"{failed[0].reason}: ")


T = TypeVar("T", bound=KubernetesObject)


class ClusterStatus(msgspec.Struct, frozen=True):
    """The ClusterPolicy's state, the components of each GPU node, and invalid values."""

    policy: str | None
    """The name of the active ClusterPolicy; None without a ClusterPolicy."""
    state: str | None
    """`status.state` of this ClusterPolicy: `ready`."""
    reason: str
    """Code and message of the policy's `Ready` condition."""
    components: tuple[Row, ...]
    invalid: tuple[InvalidValue, ...] = ()
    """Invalid values of nodes' desired state; `reason` has those of the policy."""
    namespace: str = ""
    """The namespace of the controller and its operands."""
    is_installed: bool = True
    """Whether the API server has the kind ClusterPolicy."""
    kubevirt: str = ""
    """Why VMs of KubeVirt can't have all devices that nodes offer: code and message; empty where they can."""
    held: bool = False
    """Whether the lease of an uninstall keeps all controllers from leading; False where that is not known."""

    @property
    def verdict(self) -> str:
        """Whether all is well, in one line."""
        if not self.is_installed:
            return "Not installed: this cluster has no kind ClusterPolicy."
        if self.policy is None:
            return f"Not ready: there is no ClusterPolicy, so the controller deploys nothing{self._hold}."
        nodes = {row.node for row in self.components}
        where = f"gpuvirt in namespace {self.namespace}, {count_of(len(nodes), 'node')} with GPUs"
        if self.well:
            return f"Ready: {where}"
        late = {row.node for row in self.components if not row.ready}
        is_ready = self.state == "ready"
        parts = [] if is_ready else [f"ClusterPolicy {self.policy} is {self.state or 'not seen by a controller yet'}"]
        parts += [f"{len(late)} of {len(nodes)} nodes not ready"] if late else []
        parts += [count_of(len(self.invalid), "invalid value")] if self.invalid else []
        parts += ["KubeVirt is not configured for the offered devices"] if self.kubevirt else []
        return f"Not ready: {', '.join(parts)}; {where}{self._hold}"

    @property
    def _hold(self) -> str:
        if not self.held:
            return ""
        lift = f"kubectl delete lease {CONTROLLER_LEASE} -n {self.namespace}"
        return f"; no controller leads for 10 minutes after an uninstall, unless you run: {lift}"

    def of_nodes(self, names: frozenset[str]) -> "ClusterStatus":
        """Return the state without the components and invalid values of other nodes."""
        return replace(
            self,
            components=tuple(row for row in self.components if row.node in names),
            invalid=tuple(value for value in self.invalid if not value.node or value.node in names),
        )

    @property
    def well(self) -> bool:
        """Whether the policy, all components and KubeVirt are ready, and no value is invalid."""
        is_ready = self.state == "ready" and all(row.ready for row in self.components)
        return is_ready and not self.invalid and not self.kubevirt


async def ask(client: Client, namespace: Namespace) -> ClusterStatus:
    """Read the state from the API server; raises ApiError.

    The controller writes its namespace into the ClusterPolicy. Until it has, the operands are those in `namespace`.
    """

    async def listed(
        resource: Resource, shape: type[T], without: tuple[type[ApiError], ...] = (NotFoundError,)
    ) -> tuple[T, ...]:
        try:
            return (await client.list(Collection(resource, shape))).items
        except without:  # the kind is not installed
            return ()

    try:
        found = (await client.list(Collection(CLUSTER_POLICIES, StoredPolicy))).items
    except NotFoundError:
        return ClusterStatus(None, None, "", (), is_installed=False)
    choice = choose(found)
    status = choice.stored.status if choice is not None else None
    reported = status.namespace if status is not None else ""
    namespace = parse_namespace(reported) if reported else namespace
    nodes, gpu_nodes, operand_pods, sets = await asyncio.gather(
        listed(NODES, Node),
        listed(GPU_NODES, GpuNode),
        listed(pods(namespace), Pod),
        listed(daemon_sets(namespace), StoredObject, (NotFoundError, ForbiddenError)),
    )
    conditions = status.conditions if status is not None else ()
    try:
        lease = await client.get(leases(namespace), CONTROLLER_LEASE, Lease)
    except (NotFoundError, ForbiddenError):  # unknown: the hold is a hint beside the verdict
        lease = Lease(Metadata())
    by_type = {condition.type: condition for condition in conditions}
    ready, kubevirt = by_type.get(policy_status.READY), by_type.get(policy_status.KUBEVIRT)
    by_name = {gpu_node.metadata.name: gpu_node for gpu_node in gpu_nodes}
    deployer = None
    if choice is not None and isinstance(choice.policy, ClusterPolicy):
        beside = any(OPERANDS_OFF_ANNOTATION in node.metadata.annotations for node in nodes)
        deployer = Deployer(
            policies.beside(choice.policy) if beside else choice.policy,
            has_image=ready is None or ready.reason != ReasonCode.IMAGE_UNKNOWN,
            has_daemon_sets=any(OPERAND_LABEL in daemon_set.metadata.labels for daemon_set in sets),
            beside=beside,
        )
    return ClusterStatus(
        policy=choice.stored.metadata.name if choice is not None else None,
        state=str(status.state) if status is not None and status.state is not None else None,
        reason=ready.why if ready is not None else "",
        components=rows(nodes, by_name, operand_pods, deployer, await _causes(client, namespace, operand_pods)),
        invalid=tuple(_invalid(choice, nodes, by_name)),
        namespace=namespace,
        kubevirt=kubevirt.why if kubevirt is not None and kubevirt.status == "False" else "",
        held=(lease.spec.holder_identity or "").startswith(UNINSTALL),
    )


NO_CLUSTER_DNS = "MissingClusterDNS"
"""The kubelet's warning at each start of a pod on a node without cluster DNS: it stops none."""


async def _causes(client: Client, namespace: Namespace, pods: Iterable[Pod]) -> Mapping[str, str]:
    """Return what warnings say about each pod whose status does not say why it is not ready, by uid.

    Events may be read with more rights than the rest; without them no pod has a cause.
    """
    statuses = {pod.metadata.uid: pod.status for pod in pods}
    asked = {uid for uid, seen in statuses.items() if not (seen.ready or seen.waiting_reason or seen.initializing)}
    if not asked:
        return NO_CAUSES
    of_pods = Collection(replace(EVENTS, namespace=namespace), SeenEvent, fields="involvedObject.kind=Pod")
    try:
        seen = (await client.list(of_pods)).items
    except ForbiddenError:
        return NO_CAUSES
    by_pod: dict[str, list[SeenEvent]] = {uid: [] for uid in asked}
    for event in (event for event in seen if event.type == EventLevel.WARNING and event.reason != NO_CLUSTER_DNS):
        by_pod.get(event.involved_object.uid, []).append(event)
    return {uid: newest(events) for uid, events in by_pod.items()}


def _invalid(choice: Choice | None, nodes: Iterable[Node], gpu_nodes: Mapping[str, GpuNode]) -> Iterator[InvalidValue]:
    """Yield the invalid values of nodes; without a valid policy, only those that agents report."""
    policy = choice.policy if choice is not None and isinstance(choice.policy, ClusterPolicy) else None
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        name, labels = node.metadata.name, node.metadata.labels
        gpu_node = gpu_nodes.get(name)
        placement = placement_of(labels, gpu_node, policies.defaults_of(policy)) if policy is not None else None
        if placement is None or placement.counts:
            yield from of_node(name, placement, gpu_node)

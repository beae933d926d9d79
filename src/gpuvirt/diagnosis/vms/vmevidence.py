"""A VM, its VMI and its pod, and the nodes that could run it, as the API server returns them.

None stands for objects that could not be read, an empty tuple for objects that do not exist.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.diagnosis.evidence import IOMMUFD_RESOURCE, ClusterNode
from gpuvirt.diagnosis.vms.podclaims import ClaimSeen
from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.facts.ids import NodeName, VgpuType
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import DEFAULT_SCHEDULER, ENDED, Condition, Placement, Taint
from gpuvirt.kube.kinds.gpunode import READY, Gpu, GpuNode, Offered, Status, Vgpu
from gpuvirt.kube.kinds.kubevirt import Devices, Vm, Vmi
from gpuvirt.model.allocation.launcherpods import user_texts
from gpuvirt.model.change.vgpus.gpustate import size_of
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.model.offers.ondemand.typesannotation import VGPU_TYPES_ANNOTATION, Types, types_of
from gpuvirt.model.reasons import ReasonCode, reasons_in, with_code
from gpuvirt.model.shares.demand import whole_amounts
from gpuvirt.model.workers.away import AwayWorker, NodePhase

OTHER_PROVIDERS = ("devices.kubevirt.io/",)
"""Prefixes of the resources that the pods of all VMs request, with or without GPUs."""


class ObjectKind(StrEnum):
    """The kinds of objects that `gpuvirt why` explains, by their short names."""

    VM = "vm"
    VMI = "vmi"
    POD = "pod"
    CLAIM = "claim"


class ObjectRef(msgspec.Struct, frozen=True):
    """The object to explain."""

    kind: ObjectKind
    name: str
    namespace: str

    @property
    def text(self) -> str:
        """The object in words: `vm default/vm-a`."""
        return f"{self.kind} {self.namespace}/{self.name}"


class PodSeen(msgspec.Struct, frozen=True):
    """A pod."""

    name: str
    namespace: str
    phase: str = ""
    node: str = ""
    """The node on which the scheduler placed it."""
    reason: str = ""
    message: str = ""
    waiting: str = ""
    """Why one of its containers does not run yet."""
    gates: tuple[str, ...] = ()
    """Its scheduling gates."""
    requests: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many devices it requests of each extended resource."""
    placement: Placement = Placement()
    conditions: tuple[Condition, ...] = ()
    vm: str = ""
    """The VM, if the pod is a virt-launcher pod."""
    uid: str = ""
    scheduler: str = DEFAULT_SCHEDULER
    claims: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Its ResourceClaims by their names in the pod; empty names where they are not made yet."""

    @property
    def user(self) -> str:
        """The pod, as GpuNodes name users of devices."""
        return f"pod {self.namespace}/{self.name}"

    @property
    def devices(self) -> Mapping[str, int]:
        """How many devices it requests of each resource that may be a GPU."""
        return {name: count for name, count in self.requests.items() if not name.startswith(OTHER_PROVIDERS)}


class DeviceSeen(msgspec.Struct, frozen=True):
    """A GPU or vGPU as a GpuNode reports it."""

    id: str
    name: str
    offered_as: str | None
    users: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


class OnDemandGpu(msgspec.Struct, frozen=True):
    """A GPU in mode on-demand whose vGPUs have users."""

    id: str
    resources: frozenset[str]
    """The resources of which it offers a vGPU once its vGPUs have gone: their types do not fit beside these."""
    users: tuple[str, ...]


class GpuNodeSeen(msgspec.Struct, frozen=True):
    """The GpuNode of a node, in which its agent reports."""

    offers: tuple[Offered, ...] = ()
    devices: tuple[DeviceSeen, ...] = ()
    withheld: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By resource: why the controller withholds it; the text begins with the code."""
    sharing: str | None = None
    """The enforcement of new pods' shares, with its source; None where no GPU is shared, or where it is unknown."""
    on_demand: tuple[OnDemandGpu, ...] = ()
    types: Types = msgspec.field(default_factory=dict)
    """The types that its on-demand resources stand for, by its node's annotation."""
    against: tuple[str, ...] = ()
    """The invalid values of the desired state, and why it is not reached; the texts begin with the code."""


class NodeSeen(msgspec.Struct, frozen=True):
    """A node with the fields that the scheduler uses."""

    name: str
    ready: bool = True
    unschedulable: bool = False
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many devices its kubelet counts of each extended resource."""
    gpu_node: GpuNodeSeen | None = None


class VmEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that the explanation of a VM, a VMI or a pod uses."""

    target: ObjectRef
    vm: Vm | None = None
    instancetype: Devices = Devices()
    """The devices that the VM's instance type adds."""
    vmi: Vmi | None = None
    pod: PodSeen | None = None
    pod_unread: bool = False
    """Whether the pods of the namespace could not be read."""
    kubevirts: tuple[KubeVirt, ...] | None = ()
    kubevirt_installed: bool = True
    nodes: tuple[NodeSeen, ...] | None = ()
    pods: tuple[PodSeen, ...] | None = ()
    """All pods of the cluster that have not ended."""
    stopped: AwayWorker | None = None
    """Why the VM is off, if a VgpuSchedule is the cause."""
    away: Mapping[NodeName, AwayWorker] = msgspec.field(default_factory=dict)
    """The nodes that get no pods because of a VgpuSchedule."""
    phases: Mapping[NodeName, tuple[NodePhase, ...]] = msgspec.field(default_factory=dict)
    """The phases of VgpuSchedules that have a vGPU config for a node."""
    event: str = ""
    """The newest event that tells why the pod on its node does not start: `FailedCreatePodSandBox: no runtime ...`."""
    claims: tuple[ClaimSeen, ...] = ()
    """The target, if it is a claim; else the claims of the pod."""
    shares: SharesSeen | None = None
    """The shared GPUs, where the pod requests units of them and they could be read."""
    neighbours: tuple[str, ...] = ()
    """Where the target does not exist: the names of all objects of its kind in its namespace."""
    namespaces: tuple[str, ...] = ()
    """Other namespaces with an object of the target's kind and name."""
    unread: tuple[str, ...] = ()
    """The API objects that could not be read, and why."""

    @property
    def found(self) -> bool:
        """Whether the target exists."""
        if self.target.kind is ObjectKind.CLAIM:
            return bool(self.claims)
        return {ObjectKind.VM: self.vm, ObjectKind.VMI: self.vmi, ObjectKind.POD: self.pod}[
            self.target.kind
        ] is not None

    @property
    def devices_of_vm(self) -> Devices:
        """The devices that the VM requests, with those of its instance type."""
        return self.vm.devices.joined(self.instancetype) if self.vm is not None else Devices()

    @property
    def devices_of_guest(self) -> Devices:
        """The devices that the VMI requests, else the VM."""
        return self.vmi.devices if self.vmi is not None else self.devices_of_vm

    @property
    def requests(self) -> Mapping[str, int]:
        """How many devices are requested of each resource: by the pod, else by the VMI, else by the VM."""
        return self.pod.devices if self.pod is not None else self.devices_of_guest.counts

    @property
    def claimed(self) -> tuple[str, ...]:
        """The claims in words, with those that are not read or not made: `a10 (passthrough.gpuvirt.io)`."""
        known = {claim.name: claim.text for claim in self.claims}
        if self.target.kind is ObjectKind.CLAIM:
            return tuple(known.values())
        if self.pod is None:
            return tuple(f"{name} of its spec" for name in self.devices_of_guest.claims)
        return tuple(
            known.get(claim, claim) if claim else f"{name} of its spec, which is not made yet"
            for name, claim in self.pod.claims.items()
        )

    @property
    def placement(self) -> Placement:
        """The node selector and tolerations of the pod, else of the VMI, else of the VM."""
        if self.pod is not None:
            return self.pod.placement
        if self.vmi is not None:
            return self.vmi.spec
        return self.vm.spec.template.spec if self.vm is not None else Placement()

    def offers(self) -> Sequence[tuple[str, Offered]]:
        """Return the offers of all nodes, each with the node's name."""
        return [(node.name, offer) for node in self.nodes or () if node.gpu_node for offer in node.gpu_node.offers]


LAUNCHER_LABEL, LAUNCHER = "kubevirt.io", "virt-launcher"
VM_LABEL = "vm.kubevirt.io/name"
CREATOR_LABEL = "kubevirt.io/created-by"
"""The label of a virt-launcher pod with the uid of its VMI."""


def pod_seen(pod: core.WholePod) -> PodSeen:
    """Return the evidence about a pod."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    waiting = (status.state.waiting for status in statuses)
    messages = (f"{state.reason}: {state.message}" if state.message else state.reason for state in waiting if state)
    labels = pod.metadata.labels
    return PodSeen(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        uid=pod.metadata.uid,
        scheduler=pod.spec.scheduler_name,
        claims=pod.claims,
        phase=pod.status.phase,
        node=pod.spec.node_name,
        reason=pod.status.reason,
        message=pod.status.message,
        waiting=next(messages, ""),
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        requests=_extended(pod.spec),
        placement=Placement(pod.spec.node_selector, pod.spec.tolerations),
        conditions=pod.status.conditions,
        vm=labels.get(VM_LABEL, "") if labels.get(LAUNCHER_LABEL) == LAUNCHER else "",
    )


def launcher_of(pods: Iterable[core.WholePod], vm: str, vmi: Vmi | None) -> core.WholePod | None:
    """Return the virt-launcher pod of a VM: a running one, and during a migration the one on the VMI's node."""
    uid, node = (vmi.metadata.uid, vmi.status.node_name) if vmi is not None else ("", "")

    def rank(pod: core.WholePod) -> tuple[bool, bool, str]:
        has_guest = node != "" and pod.spec.node_name == node
        return pod.status.phase not in ENDED, has_guest, pod.metadata.creation_timestamp

    labels = {VM_LABEL: vm, **({CREATOR_LABEL: uid} if uid else {})}
    found = (pod for pod in pods if labels.items() & pod.metadata.labels.items())
    return max(found, key=rank, default=None)


def node_seen(node: core.Node, gpu_node: GpuNode | None) -> NodeSeen:
    """Return the evidence about a node, with its GpuNode."""
    ready = core.condition(node.status.conditions, "Ready")
    types = types_of(node.metadata.annotations.get(VGPU_TYPES_ANNOTATION))
    return NodeSeen(
        name=node.metadata.name,
        ready=ready is None or ready.status == "True",
        unschedulable=node.spec.unschedulable,
        labels=node.metadata.labels,
        taints=node.spec.taints,
        allocatable=_amounts(node.status.allocatable),
        gpu_node=_gpu_node(gpu_node, types) if gpu_node is not None else None,
    )


def cluster_node(node: core.Node) -> ClusterNode:
    """Return the evidence about a node on which KubeVirt runs VMs."""
    count = node.status.allocatable.get(IOMMUFD_RESOURCE)
    return ClusterNode(
        node.metadata.name, node.status.node_info.kernel_version, None if count is None else count != "0"
    )


def _gpu_node(found: GpuNode, types: Types) -> GpuNodeSeen:
    status, spec = found.status, found.spec
    gpus, shares = (status.gpus, status.shares) if status is not None else ((), None)
    return GpuNodeSeen(
        offers=status.resources if status is not None else (),
        devices=(
            *(_device(gpu.address, gpu.name or gpu.address, gpu) for gpu in gpus),
            *(_device(vgpu.id, vgpu.type, vgpu) for gpu in gpus for vgpu in gpu.vgpus),
        ),
        on_demand=tuple(_on_demand(gpus, types)),
        types=types,
        against=tuple(_against(status)) if status is not None else (),
        sharing=f"{shares.enforcement} ({shares.origin})" if shares is not None else None,
        withheld={
            withheld.resource: with_code(withheld.code, withheld.message)
            for withheld in (spec.withheld if spec is not None else ())
        },
    )


def _against(status: Status) -> Iterator[str]:
    yield from (entry.message for entry in status.invalid)
    for found in status.conditions:
        if found.type == READY and found.status == "False":
            yield from reasons_in(found.why)


def _on_demand(gpus: Iterable[Gpu], types: Types) -> Iterator[OnDemandGpu]:
    for gpu in gpus:
        users = user_texts(user for vgpu in gpu.vgpus for user in vgpu.users)
        if gpu.desired_mode != DesiredMode.ON_DEMAND or gpu.planning is None or gpu.reasons or not users:
            continue
        sizes = {size_of(VgpuType(vgpu.type)) for vgpu in gpu.vgpus}
        listed = {VgpuType(vgpu_type.name) for vgpu_type in gpu.planning.types}
        others = {vgpu_type for vgpu_type in listed if size_of(vgpu_type) not in sizes}
        resources = frozenset(str(name) for name, vgpu_type in types.items() if vgpu_type in others)
        yield OnDemandGpu(gpu.address, resources, users)


def _device(device: str, name: str, found: Gpu | Vgpu) -> DeviceSeen:
    return DeviceSeen(
        device,
        name,
        found.offered_as,
        found.users,
        tuple(
            with_code(reason.code, reason.message)
            for reason in found.reasons
            if reason.code != ReasonCode.CARRIES_VGPUS
        ),
    )


def _extended(spec: core.WholePodSpec) -> dict[str, int]:
    """Return the extended resources of a pod: the sum of its containers, or of an init container if more."""
    counts: dict[str, int] = {}
    for container in spec.containers:
        for name, count in _limits(container).items():
            counts[name] = counts.get(name, 0) + count
    for container in spec.init_containers:
        for name, count in _limits(container).items():
            counts[name] = max(counts.get(name, 0), count)
    return counts


def _limits(container: core.Container) -> dict[str, int]:
    return {name: amount for name, amount in _amounts(container.resources.limits).items() if amount}


def _amounts(quantities: Mapping[str, str | float]) -> dict[str, int]:
    """Return the amounts of extended resources."""
    return whole_amounts({name: quantity for name, quantity in quantities.items() if "/" in name})

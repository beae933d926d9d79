"""A VM, its VMI and its pod, and the nodes that could run it, as the API server returns them.

None stands for objects that could not be read, an empty tuple for objects that do not exist.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.model.workers.away import AwayWorker
from gpuvirt.model.workers.coming import NodePhase

OTHER_PROVIDERS = ("devices.kubevirt.io/",)
"""Prefixes of the resources that the pods of all VMs request, with or without GPUs."""


class ObjectKind(StrEnum):
    """The kinds of objects that `gpuvirt why` explains, by their short names."""

    VM = "vm"
    VMI = "vmi"
    POD = "pod"


class ObjectRef(msgspec.Struct, frozen=True):
    """The object to explain."""

    kind: ObjectKind
    name: str
    namespace: str

    @property
    def text(self) -> str:
        """The object in words: `vm default/vm-a`."""
        return f"{self.kind} {self.namespace}/{self.name}"


class ConditionSeen(msgspec.Struct, frozen=True):
    """A condition of an object."""

    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """Its reason and message on one line."""
        return ": ".join(part for part in (self.reason, " ".join(self.message.split())) if part)


class Toleration(msgspec.Struct, frozen=True):
    """A taint that a pod tolerates; an empty key with `Exists` tolerates every taint."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: "Taint") -> bool:
        """Return whether the toleration matches a taint (core/v1)."""
        if self.effect not in {"", taint.effect}:
            return False
        if self.operator == "Exists":
            return self.key in {"", taint.key}
        return (self.key, self.value) == (taint.key, taint.value)


class Taint(msgspec.Struct, frozen=True):
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""

    @property
    def text(self) -> str:
        """The taint as `kubectl taint` writes it."""
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class PodPlacement(msgspec.Struct, frozen=True):
    """The node selector and tolerations of a pod; affinity is not read."""

    node_selector: Mapping[str, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()

    def untolerated(self, taints: Iterable[Taint]) -> Taint | None:
        """Return the first taint that the pod does not tolerate, None where it tolerates all."""
        hard = (taint for taint in taints if taint.effect in {"NoSchedule", "NoExecute"})
        return next((taint for taint in hard if not any(known.tolerates(taint) for known in self.tolerations)), None)


class DeviceRequests(msgspec.Struct, frozen=True):
    """The devices that a VM or VMI requests: a resource name for each device."""

    gpus: tuple[str, ...] = ()
    host_devices: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many devices it requests of each resource."""
        names = (*self.gpus, *self.host_devices)
        return {name: names.count(name) for name in names}


class VmSeen(msgspec.Struct, frozen=True):
    """A VirtualMachine."""

    run_strategy: str
    """`Always`, `Halted`, `Manual` and so on; `running: true` means Always, `running: false` means Halted."""
    status: str = ""
    """`status.printableStatus`: `Stopped`."""
    has_run_strategy: bool = True
    """Whether the VM has `runStrategy`, not the older `running`."""
    saved_strategy: str = ""
    """The strategy that a VgpuSchedule has replaced by Halted; empty if none has."""
    requests: DeviceRequests = DeviceRequests()
    placement: PodPlacement = PodPlacement()
    conditions: tuple[ConditionSeen, ...] = ()
    uid: str = ""


class VmiSeen(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance."""

    phase: str = ""
    node: str = ""
    requests: DeviceRequests = DeviceRequests()
    placement: PodPlacement = PodPlacement()
    conditions: tuple[ConditionSeen, ...] = ()


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
    placement: PodPlacement = PodPlacement()
    conditions: tuple[ConditionSeen, ...] = ()
    vm: str = ""
    """The VM, if the pod is a virt-launcher pod."""

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


class OfferSeen(msgspec.Struct, frozen=True):
    """A resource as a GpuNode reports it."""

    name: str
    healthy: int
    registered: bool
    pci_vendor_selectors: tuple[str, ...] = ()
    mdev_name_selectors: tuple[str, ...] = ()


class GpuNodeSeen(msgspec.Struct, frozen=True):
    """The GpuNode of a node, in which its agent reports."""

    offers: tuple[OfferSeen, ...] = ()
    devices: tuple[DeviceSeen, ...] = ()
    withheld: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By resource: why the controller withholds it; the text begins with the code."""
    sharing: str | None = None
    """The enforcement of new pods' shares, with its source; None where no GPU is shared, or where it is unknown."""


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
    vm: VmSeen | None = None
    vmi: VmiSeen | None = None
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
        return {ObjectKind.VM: self.vm, ObjectKind.VMI: self.vmi, ObjectKind.POD: self.pod}[
            self.target.kind
        ] is not None

    @property
    def requests(self) -> Mapping[str, int]:
        """How many devices are requested of each resource: by the pod, else by the VMI, else by the VM."""
        if self.pod is not None:
            return self.pod.devices
        owner = self.vmi or self.vm
        return owner.requests.counts if owner is not None else {}

    @property
    def placement(self) -> PodPlacement:
        """The node selector and tolerations of the pod, else of the VMI, else of the VM."""
        owner = self.pod or self.vmi or self.vm
        return owner.placement if owner is not None else PodPlacement()

    def offers(self) -> Sequence[tuple[str, OfferSeen]]:
        """Return the offers of all nodes, each with the node's name."""
        return [(node.name, offer) for node in self.nodes or () if node.gpu_node for offer in node.gpu_node.offers]


def condition(conditions: Iterable[ConditionSeen], kind: str) -> ConditionSeen | None:
    """Return the condition of a type."""
    return next((found for found in conditions if found.type == kind), None)

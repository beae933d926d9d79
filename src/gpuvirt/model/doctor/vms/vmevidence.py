"""What the API server knows of a VM, its VMI and its pod, and of the nodes that could run it.

None is what could not be read; an empty tuple is what there is none of.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.model.doctor.kubevirt import KubeVirt

OTHER_PROVIDERS = ("devices.kubevirt.io/",)
"""How names of resources begin that every VM's pod requests, be it with a GPU or without."""


class ObjectKind(StrEnum):
    """The kinds of objects that are asked about, by their short names."""

    VM = "vm"
    VMI = "vmi"
    POD = "pod"


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The object that is asked about."""

    kind: ObjectKind
    name: str
    namespace: str

    @property
    def text(self) -> str:
        """The object in words: `vm default/vm-a`."""
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ConditionSeen:
    """A condition of an object."""

    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """What it says, on one line."""
        return ": ".join(part for part in (self.reason, " ".join(self.message.split())) if part)


@dataclass(frozen=True, slots=True)
class Toleration:
    """A taint that a pod tolerates; an empty key with `Exists` is every taint."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: "Taint") -> bool:
        """Return whether a pod with this toleration can be put on a node with a taint (core/v1)."""
        if self.effect not in {"", taint.effect}:
            return False
        if self.operator == "Exists":
            return self.key in {"", taint.key}
        return (self.key, self.value) == (taint.key, taint.value)


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""

    @property
    def text(self) -> str:
        """The taint as `kubectl taint` writes it."""
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod may run, as far as it says so in simple words."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()

    def untolerated(self, taints: Iterable[Taint]) -> Taint | None:
        """Return the first taint that keeps a pod away, None where none does."""
        hard = (taint for taint in taints if taint.effect in {"NoSchedule", "NoExecute"})
        return next((one for one in hard if not any(each.tolerates(one) for each in self.tolerations)), None)


@dataclass(frozen=True, slots=True)
class DeviceRequests:
    """The devices that a VM or VMI asks for, a name for each device."""

    gpus: tuple[str, ...] = ()
    host_devices: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many of each resource."""
        names = (*self.gpus, *self.host_devices)
        return {name: names.count(name) for name in names}


@dataclass(frozen=True, slots=True)
class VmSeen:
    """A VirtualMachine."""

    run_strategy: str
    """`Always`, `Halted`, `Manual` and so on; `running: true` is Always, and false Halted."""
    status: str = ""
    """What KubeVirt calls its state: `Stopped`."""
    has_run_strategy: bool = True
    """Whether it says so by `runStrategy`, and not by the older `running`."""
    requests: DeviceRequests = DeviceRequests()
    placement: Placement = Placement()
    conditions: tuple[ConditionSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class VmiSeen:
    """A VirtualMachineInstance."""

    phase: str = ""
    node: str = ""
    requests: DeviceRequests = DeviceRequests()
    placement: Placement = Placement()
    conditions: tuple[ConditionSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod."""

    name: str
    namespace: str
    phase: str = ""
    node: str = ""
    """Where the scheduler has put it."""
    reason: str = ""
    message: str = ""
    waiting: str = ""
    """Why a container of it does not run yet."""
    gates: tuple[str, ...] = ()
    """Its scheduling gates."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """The extended resources that it requests."""
    placement: Placement = Placement()
    conditions: tuple[ConditionSeen, ...] = ()
    vm: str = ""
    """The VM whose virt-launcher pod it is."""

    @property
    def user(self) -> str:
        """The pod as GpuNodes name users."""
        return f"pod {self.namespace}/{self.name}"

    @property
    def devices(self) -> Mapping[str, int]:
        """How many it requests of each resource that may be a GPU."""
        return {name: count for name, count in self.requests.items() if not name.startswith(OTHER_PROVIDERS)}


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """A GPU or vGPU as a GpuNode reports it."""

    id: str
    name: str
    offered_as: str | None
    users: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OfferSeen:
    """A resource as a GpuNode reports it."""

    name: str
    healthy: int
    registered: bool
    pci_vendor_selectors: tuple[str, ...] = ()
    mdev_name_selectors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuNodeSeen:
    """What a node's agent reports."""

    offers: tuple[OfferSeen, ...] = ()
    devices: tuple[DeviceSeen, ...] = ()
    withheld: Mapping[str, str] = field(default_factory=dict)
    """By resource: why the controller has it not offered, a code first."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node, as the scheduler sees it."""

    name: str
    ready: bool = True
    unschedulable: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """The extended resources that its kubelet counts."""
    gpu_node: GpuNodeSeen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VmEvidence:
    """All that is known."""

    target: ObjectRef
    vm: VmSeen | None = None
    vmi: VmiSeen | None = None
    pod: PodSeen | None = None
    pod_unread: bool = False
    """Whether it is unknown which pod it has."""
    kubevirts: tuple[KubeVirt, ...] | None = ()
    kubevirt_installed: bool = True
    nodes: tuple[NodeSeen, ...] | None = ()
    pods: tuple[PodSeen, ...] | None = ()
    """All pods of the cluster that have not ended."""
    neighbours: tuple[str, ...] = ()
    """What else of the kind there is in the namespace, where the target is not there."""
    namespaces: tuple[str, ...] = ()
    """Other namespaces that have one of the target's name."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""

    @property
    def found(self) -> bool:
        """Whether the target is there."""
        return {ObjectKind.VM: self.vm, ObjectKind.VMI: self.vmi, ObjectKind.POD: self.pod}[
            self.target.kind
        ] is not None

    @property
    def requests(self) -> Mapping[str, int]:
        """How many devices are asked for of each resource: by the pod, else by the VMI, else by the VM."""
        if self.pod is not None:
            return self.pod.devices
        owner = self.vmi or self.vm
        return owner.requests.counts if owner is not None else {}

    @property
    def placement(self) -> Placement:
        """Where it may run."""
        owner = self.pod or self.vmi or self.vm
        return owner.placement if owner is not None else Placement()

    def offers(self) -> Sequence[tuple[str, OfferSeen]]:
        """Return what nodes offer, each with the node's name."""
        return [(node.name, one) for node in self.nodes or () if node.gpu_node for one in node.gpu_node.offers]


def condition(conditions: Iterable[ConditionSeen], kind: str) -> ConditionSeen | None:
    """Return the condition of a type."""
    return next((one for one in conditions if one.type == kind), None)

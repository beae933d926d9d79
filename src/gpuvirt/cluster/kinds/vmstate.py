"""What `gpuvirt why vm/NAME` reads of VMs, VMIs, pods and nodes: their states, and what they request.

Source: KubeVirt's API `kubevirt.io/v1`, Kubernetes' API `core/v1`.
"""

import msgspec

from gpuvirt.cluster.kinds.kubevirt import Devices
from gpuvirt.cluster.resources import Metadata


class Condition(msgspec.Struct, frozen=True):
    """A condition of any of them."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class Toleration(msgspec.Struct, frozen=True):
    """A taint that a pod tolerates."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class Taint(msgspec.Struct, frozen=True):
    """A taint of a node."""

    key: str = ""
    effect: str = ""
    value: str = ""


class Domain(msgspec.Struct, frozen=True):
    """A guest's hardware."""

    devices: Devices = Devices()


class VmiSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a VMI is to be."""

    domain: Domain = Domain()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()


class VmiStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a VMI is."""

    phase: str = ""
    node_name: str = ""
    conditions: tuple[Condition, ...] = ()


class Vmi(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance."""

    metadata: Metadata
    spec: VmiSpec = VmiSpec()
    status: VmiStatus = VmiStatus()


class Template(msgspec.Struct, frozen=True):
    """What a VM makes VMIs of."""

    spec: VmiSpec = VmiSpec()


class InstancetypeRef(msgspec.Struct, frozen=True):
    """The instance type of a VM."""

    name: str = ""
    kind: str = "VirtualMachineClusterInstancetype"


class VmSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a VM is to be."""

    running: bool | None = None
    run_strategy: str | None = None
    instancetype: InstancetypeRef | None = None
    template: Template = Template()


class VmStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a VM is."""

    printable_status: str = ""
    conditions: tuple[Condition, ...] = ()


class Vm(msgspec.Struct, frozen=True):
    """A VirtualMachine."""

    metadata: Metadata
    spec: VmSpec = VmSpec()
    status: VmStatus = VmStatus()


class Named(msgspec.Struct, frozen=True):
    """Any object, of which the name counts."""

    metadata: Metadata


class Resources(msgspec.Struct, frozen=True):
    """What a container requests; of an extended resource the limit is the request."""

    limits: dict[str, str | int] = {}


class Container(msgspec.Struct, frozen=True):
    """A container."""

    resources: Resources = Resources()


class Gate(msgspec.Struct, frozen=True):
    """What keeps a pod from being scheduled."""

    name: str = ""


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a pod is to be."""

    node_name: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[Gate, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """Why a container does not run."""

    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct, frozen=True):
    """What a container does."""

    waiting: Waiting | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """How a container is."""

    state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a pod is."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether a node takes pods."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(msgspec.Struct, frozen=True):
    """What a node has for pods."""

    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()


class Node(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

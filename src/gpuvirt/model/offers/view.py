"""The view of a node from which all output is made: ListAndWatch, tables, metrics, files.

The agent writes it to `/run/gpuvirt/node.json` in this form, so its fields are a contract
(docs/reference/json.md): fields are added, never renamed. `version` grows with changes that readers must handle.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework, SchedulerPolicy
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.settings import VfioNodes
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.devices.candidates import ResourceKind
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.validation import ValidatorCondition
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.sharedgpus import NodeVgpuType, SharedGpus
from gpuvirt.paths import HostPath

VERSION = 1


class AgentView(msgspec.Struct, frozen=True):
    """The agent that wrote the view."""

    version: str
    pid: int
    started: datetime
    plugin_only: bool
    vfio_nodes: VfioNodes = VfioNodes.BOTH
    """Its setting; an agent that is older than this field gives both."""
    node: str | None = None
    """The name of its node; None outside a cluster, and in a view of an older agent."""


class DeviceView(msgspec.Struct, frozen=True):
    """A device as the agent lists it to the kubelet."""

    id: DeviceId
    healthy: bool
    numa_node: int | None
    group: IommuGroup | None
    gpu: PciAddress | None
    """None for an id of mode on-demand for which a vGPU would be created."""
    nodes: tuple[HostPath, ...] = ()
    """The device nodes that a VM opens to use it."""
    reasons: tuple[Reason, ...] = ()
    allocated_to: str | None = None
    vgpu: VgpuId | None = None
    """The vGPU of an id of mode on-demand, None for other ids: they are the devices' own."""


class ResourceView(msgspec.Struct, frozen=True):
    """A resource with its devices."""

    name: ResourceName
    devices: tuple[DeviceView, ...]
    also_called: tuple[str, ...] = ()
    """The names from today's PCI ID database, where the resource was first offered under another name."""
    registered: bool = False
    not_registered_because: Reason | None = None
    kind: ResourceKind = ResourceKind.WHOLE
    pci_vendor_selectors: tuple[str, ...] = ()
    """KubeVirt's selectors for its devices: `10DE:2236`; none for mdevs, and where it has no devices now."""
    mdev_name_selectors: tuple[str, ...] = ()
    """KubeVirt's selectors for its mdevs: `NVIDIA A10-24Q`."""
    withheld: bool = False
    """Whether the resource is withheld; `not_registered_because` has the reason."""
    on_demand: VgpuType | None = None
    """The type of the vGPUs that are created for pods; None for another resource."""
    silent: bool = False
    """The agent sends the kubelet no more lists of it, because another plugin registers the same name."""


class VgpuView(msgspec.Struct, frozen=True):
    """A vGPU."""

    id: VgpuId
    type: str
    parent: PciAddress
    offered_as: ResourceName | None
    users: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    vms: tuple[str, ...] = ()
    """KubeVirt's VMs among the users: `namespace/name`."""


class SchedulerView(msgspec.Struct, frozen=True):
    """How the vGPUs of a GPU share its time."""

    policy: SchedulerPolicy
    timeslice_ms: int | None
    """None with best effort, and where it is less than a millisecond."""


class PlanningView(msgspec.Struct, frozen=True):
    """The inputs of a plan of a GPU's vGPUs, besides the existing vGPUs."""

    class_code: int
    subsystem: str | None = None
    """None where it has none, or where it could not be read."""
    total_vfs: int | None = None
    framework: Framework | None = None
    """None if its present driver creates no vGPUs."""
    parents: int | None = None
    """How many VFs carry a vGPU, or can; None where the GPU itself carries them."""
    types: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many vGPUs of each type that its driver lists can be created now."""


class GpuView(msgspec.Struct, frozen=True):
    """A GPU, or another function that is offered."""

    address: PciAddress
    pci_id: str
    kind: str
    name: str | None
    mode: Mode
    driver: str | None
    group: IommuGroup | None
    numa_node: int | None
    offered_as: ResourceName | None
    healthy: bool | None
    """Whether a VM could use it; None where it is not offered."""
    desired: str | None = None
    """Its desired mode: `vgpu`; None where the agent does not manage it."""
    vgpu_config: str | None = None
    """Its desired vGPU config; None without one."""
    scheduler: SchedulerView | None = None
    """None where it is unknown: only the agent reads it, and only for GPUs with the desired mode vgpu."""
    siblings: tuple[PciAddress, ...] = ()
    users: tuple[str, ...] = ()
    vgpus: tuple[VgpuView, ...] = ()
    units: int | None = None
    """The units of a GPU in mode `shared` that pods can get; None for a GPU in another mode."""
    vfs: int | None = None
    """How many VFs it has; None in a view of an agent that is older than this field."""
    reasons: tuple[Reason, ...] = ()
    """Why it is unhealthy, or not offered."""
    vms: tuple[str, ...] = ()
    """KubeVirt's VMs among the users: `namespace/name`."""
    planning: PlanningView | None = None
    """None for other functions than GPUs, and in a view of an older agent."""


class NodeView(msgspec.Struct, frozen=True):
    """The view of a node."""

    at: datetime
    """When it was written, by the wall clock: for people."""
    gpus: tuple[GpuView, ...] = ()
    functions: tuple[GpuView, ...] = ()
    """Other functions that are offered or could be: audio, USB, NVSwitches."""
    resources: tuple[ResourceView, ...] = ()
    problems: tuple[Reason, ...] = ()
    """Problems of the node or the agent that do not belong to a single device."""
    boot_id: BootId | None = None
    agent: AgentView | None = None
    """None in a view that a command made without the agent."""
    workload: Workload = Workload.PASSTHROUGH
    """The purpose of the node."""
    conditions: tuple[ValidatorCondition, ...] = ()
    """Whether the node is ready for this workload."""
    invalid: tuple[InvalidDesired, ...] = ()
    """Invalid values of the desired state, which change nothing; their reasons are among `problems`, too."""
    shared: SharedGpus = msgspec.field(default_factory=SharedGpus)
    """The GPUs in mode `shared`."""
    vgpu_type: NodeVgpuType | None = None
    """The vGPU type of a node that is a VM; None where it is unknown."""
    host_observed: bool = True
    """Whether the host has been observed; an empty view from before that says nothing about the host."""
    at_s: float | None = None
    """When it was written, by the host's monotonic clock of that boot; None in a view of an older agent."""
    version: int = VERSION


class Registration(msgspec.Struct, frozen=True):
    """Whether a resource is registered at the kubelet, and why not."""

    registered: bool
    because: Reason | None = None

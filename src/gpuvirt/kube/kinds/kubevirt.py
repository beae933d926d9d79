"""The kinds of KubeVirt and of its operator HCO: their collections, and the fields that gpuvirt reads.

Source: KubeVirt's API `kubevirt.io/v1` and the API `hco.kubevirt.io/v1beta1` of the HyperConverged Cluster Operator
(HCO), which all its versions serve. `Vm` and `Vmi` are the whole types of VMs. `VirtualMachine` and
`VirtualMachineInstance` are the parts of them that the controller keeps by the thousand: their devices, and whether
they are on a node.
"""

from typing import Protocol

import msgspec

from gpuvirt.kube.kinds.core import ENDED, Condition, OwnedMetadata, Placement
from gpuvirt.kube.resources import Collection, KubernetesObject, Metadata, Resource
from gpuvirt.model.kubevirt.kubevirt import MediatedDevices, Spec, Status
from gpuvirt.model.workers.spec import SAVED_STRATEGY

KUBEVIRTS = Resource("kubevirts", "kubevirt.io")
HYPER_CONVERGEDS = Resource("hyperconvergeds", "hco.kubevirt.io", "v1beta1")
DEFAULT_GRACE_S = 30
"""How long a guest has to shut down without `terminationGracePeriodSeconds` (DefaultGracePeriodSeconds)."""


class KubeVirt(msgspec.Struct, frozen=True, kw_only=True):
    """One KubeVirt; a cluster has at most one."""

    metadata: OwnedMetadata
    spec: Spec = Spec()
    status: Status | None = None


class HcoPermitted(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One entry of a list of permitted devices."""

    resource_name: str = ""
    pci_device_selector: str | None = None
    mdev_name_selector: str | None = None
    external_resource_provider: bool = False
    disabled: bool = False
    """Whether HCO leaves the entry out of KubeVirt's configuration."""


class HcoPermittedHostDevices(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The devices that HCO adds to KubeVirt's permitted ones. The selector is the key of an entry in its list."""

    pci_host_devices: tuple[HcoPermitted, ...] | None = None
    mediated_devices: tuple[HcoPermitted, ...] | None = None
    usb_host_devices: tuple[HcoPermitted, ...] | None = None


class HcoGates(msgspec.Struct, frozen=True, kw_only=True):
    """HCO's own feature gates. Under HCO, KubeVirt's gates for devices are always on."""

    disable_mdev_configuration: bool | None = msgspec.field(name="disableMDevConfiguration", default=None)
    """Later versions of HCO set `mediatedDevicesConfiguration.enabled` accordingly."""


class HcoSpec(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The desired state of KubeVirt's configuration."""

    permitted_host_devices: HcoPermittedHostDevices | None = None
    mediated_devices_configuration: MediatedDevices | None = None
    feature_gates: HcoGates | None = None


class HyperConverged(msgspec.Struct, frozen=True, kw_only=True):
    """One HyperConverged; a cluster has at most one."""

    metadata: OwnedMetadata
    spec: HcoSpec | None = None


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """A requested device. A device from a ResourceClaim has no name."""

    device_name: str | None = None
    claim_name: str | None = None


class Devices(msgspec.Struct, frozen=True, rename="camel"):
    """The devices that a VM requests."""

    gpus: tuple[Device, ...] | None = None
    host_devices: tuple[Device, ...] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many devices are requested of each resource, without those of ResourceClaims, which have no name."""
        devices = (*(self.gpus or ()), *(self.host_devices or ()))
        names = [device.device_name for device in devices if device.device_name]
        return {name: names.count(name) for name in names}

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims of its devices (DRA), by their names in the VM."""
        devices = (*(self.gpus or ()), *(self.host_devices or ()))
        return tuple(dict.fromkeys(device.claim_name for device in devices if device.claim_name))

    def joined(self, more: "Devices") -> "Devices":
        """Return these devices and more."""
        return Devices(
            (*(self.gpus or ()), *(more.gpus or ())), (*(self.host_devices or ()), *(more.host_devices or ()))
        )


class Firmware(msgspec.Struct, frozen=True):
    """The firmware settings of a VM, which its SMBIOS shows."""

    uuid: str = ""


class Domain(msgspec.Struct, frozen=True):
    """The virtual hardware of a VM."""

    devices: Devices = Devices()
    firmware: Firmware | None = None


class VmiSpec(Placement, frozen=True, rename="camel"):
    """The desired state of a VMI."""

    domain: Domain = Domain()
    termination_grace_period_seconds: int | None = None

    @property
    def grace_s(self) -> int:
        """How long the guest has to shut down before KubeVirt takes the power."""
        period = self.termination_grace_period_seconds
        return DEFAULT_GRACE_S if period is None else period


class Template(msgspec.Struct, frozen=True):
    """The template of a VM's VMIs."""

    spec: VmiSpec = VmiSpec()


class InstancetypeRef(msgspec.Struct, frozen=True):
    """A reference to the instance type of a VM."""

    name: str = ""
    kind: str = "VirtualMachineClusterInstancetype"


class VmSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The desired state of a VM. One of `running` and `runStrategy` is set."""

    running: bool | None = None
    run_strategy: str | None = None
    instancetype: InstancetypeRef | None = None
    template: Template = Template()

    @property
    def strategy(self) -> str:
        """The runStrategy; `running` stands for Always and Halted."""
        if self.running is not None:
            return "Always" if self.running else "Halted"
        return self.run_strategy or "Halted"


class _VirtualMachineTemplate(msgspec.Struct, frozen=True):
    spec: VmSpec = VmSpec()


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    virtual_machine_template: _VirtualMachineTemplate = _VirtualMachineTemplate()


class _Revised(msgspec.Struct, frozen=True):
    spec: Devices | str | None = None
    """A string in the oldest revisions, which are not decoded."""


class VmiPhase(msgspec.Struct, frozen=True, rename="camel"):
    """The phase of a VMI, and its node."""

    phase: str = ""
    node_name: str = ""


class VirtualMachineInstance(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance (VMI): a VM that runs or starts."""

    metadata: Metadata
    spec: VmiSpec = VmiSpec()
    status: VmiPhase = VmiPhase()

    @property
    def is_on_a_node(self) -> bool:
        """Whether the VM has been scheduled on a node and has not ended."""
        return bool(self.status.node_name) and self.status.phase not in ENDED

    @property
    def devices(self) -> Devices:
        """The devices that the VM requests."""
        return self.spec.domain.devices


class VirtualMachine(msgspec.Struct, frozen=True):
    """A VirtualMachine or a VirtualMachineInstanceReplicaSet, which have the VM's template in the same field."""

    metadata: Metadata
    spec: VmSpec = VmSpec()

    @property
    def devices(self) -> Devices:
        """The devices that each VM requests."""
        return self.spec.template.spec.domain.devices


class Migration(msgspec.Struct, frozen=True):
    """The latest live migration of a VMI."""

    completed: bool = False
    failed: bool = False


class VmiInterface(msgspec.Struct, frozen=True, rename="camel"):
    """A network interface of a VMI, by its pod or its guest agent."""

    ip_address: str = ""
    ip_addresses: tuple[str, ...] = ()


class VmiStatus(VmiPhase, frozen=True, rename="camel"):
    """The observed state of a VMI."""

    conditions: tuple[Condition, ...] = ()
    migration_state: Migration | None = None
    interfaces: tuple[VmiInterface, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its IP addresses."""
        addresses = (address for card in self.interfaces for address in (card.ip_address, *card.ip_addresses))
        return tuple(filter(None, addresses))


class Vmi(VirtualMachineInstance, frozen=True):
    """A VMI with all that is read of it: it exists while the VM runs, starts or ends."""

    metadata: OwnedMetadata
    status: VmiStatus = VmiStatus()

    @property
    def is_final(self) -> bool:
        """Whether its QEMU has ended."""
        return self.status.phase in ENDED


class StateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to stop a VMI, or to start one; KubeVirt removes it when it is done."""

    action: str
    uid: str = ""


class VmStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The observed state of a VM."""

    printable_status: str = ""
    """`Stopped`."""
    run_strategy: str = ""
    """The strategy that KubeVirt has followed last."""
    state_change_requests: tuple[StateChange, ...] = ()
    conditions: tuple[Condition, ...] = ()


class Vm(VirtualMachine, frozen=True):
    """A VirtualMachine with all that is read of it."""

    metadata: OwnedMetadata
    status: VmStatus = VmStatus()

    @property
    def saved(self) -> str:
        """The runStrategy that a schedule has replaced by Halted; empty if none has."""
        return self.metadata.annotations.get(SAVED_STRATEGY, "")


class VirtualMachinePool(msgspec.Struct, frozen=True):
    """A VirtualMachinePool."""

    metadata: Metadata
    spec: _PoolSpec = _PoolSpec()

    @property
    def devices(self) -> Devices:
        """The devices that each VM requests."""
        return self.spec.virtual_machine_template.spec.template.spec.domain.devices


class Instancetype(msgspec.Struct, frozen=True):
    """An instance type of VMs, of a namespace or of the cluster."""

    metadata: Metadata
    spec: Devices = Devices()

    @property
    def devices(self) -> Devices:
        """The devices that each VM of this type requests."""
        return self.spec


class InstancetypeRevision(msgspec.Struct, frozen=True):
    """An instance type at the time when a VM was created with it. The VM keeps it when the instance type changes."""

    metadata: Metadata
    data: _Revised | None = None

    @property
    def devices(self) -> Devices:
        """The devices that each VM of this revision requests."""
        found = self.data.spec if self.data is not None else None
        return found if isinstance(found, Devices) else Devices()


class RequestsDevices(KubernetesObject, Protocol):
    """An object of any kind that names devices."""

    @property
    def devices(self) -> Devices:
        """The devices that the object, or each of its VMs, requests."""
        ...


class DeviceKind(msgspec.Struct, frozen=True):
    """A kind whose objects name devices."""

    name: str
    """The name of the kind in messages about unknown requests."""
    collection: Collection[RequestsDevices]


REVISED = "VirtualMachineInstancetype", "VirtualMachineClusterInstancetype"
VIRTUAL_MACHINES = DeviceKind("machines", Collection(Resource("virtualmachines", "kubevirt.io"), VirtualMachine))
INSTANCES = DeviceKind(
    "instances", Collection(Resource("virtualmachineinstances", "kubevirt.io"), VirtualMachineInstance)
)
REPLICA_SETS = DeviceKind(
    "replica_sets", Collection(Resource("virtualmachineinstancereplicasets", "kubevirt.io"), VirtualMachine)
)
POOLS = DeviceKind(
    "pools", Collection(Resource("virtualmachinepools", "pool.kubevirt.io", "v1alpha1"), VirtualMachinePool)
)
INSTANCETYPES = DeviceKind(
    "instancetypes",
    Collection(Resource("virtualmachineinstancetypes", "instancetype.kubevirt.io", "v1beta1"), Instancetype),
)
CLUSTER_INSTANCETYPES = DeviceKind(
    "cluster_instancetypes",
    Collection(Resource("virtualmachineclusterinstancetypes", "instancetype.kubevirt.io", "v1beta1"), Instancetype),
)
INSTANCETYPE_REVISIONS = DeviceKind(
    "instancetype_revisions",
    Collection(
        Resource("controllerrevisions", "apps"),
        InstancetypeRevision,
        labelled=f"instancetype.kubevirt.io/object-kind in ({','.join(REVISED)})",
    ),
)
DEVICE_KINDS: tuple[DeviceKind, ...] = (
    VIRTUAL_MACHINES,
    INSTANCES,
    REPLICA_SETS,
    POOLS,
    INSTANCETYPES,
    CLUSTER_INSTANCETYPES,
    INSTANCETYPE_REVISIONS,
)
"""All kinds whose objects name devices. The code that watches, lists and compares them iterates over this tuple."""

"""The kinds of KubeVirt and of its operator HCO: their collections, and the fields that gpuvirt reads.

Source: KubeVirt's API `kubevirt.io/v1` and the API `hco.kubevirt.io/v1beta1` of the HyperConverged Cluster Operator
(HCO), which all its versions serve. Of VMs, only the device names are read, and whether they
are on a node.
"""

from typing import Protocol

import msgspec

from gpuvirt.kube.collection import Collection
from gpuvirt.kube.kinds.core import ENDED, OwnedMetadata
from gpuvirt.kube.resources import KubernetesObject, Metadata, Resource
from gpuvirt.model.kubevirt.kubevirt import MediatedDevices, Spec, Status

KUBEVIRTS = Resource("kubevirts", "kubevirt.io")
HYPER_CONVERGEDS = Resource("hyperconvergeds", "hco.kubevirt.io", "v1beta1")


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


class Devices(msgspec.Struct, frozen=True, rename="camel"):
    """The devices that a VM requests."""

    gpus: tuple[Device, ...] | None = None
    host_devices: tuple[Device, ...] | None = None


class Domain(msgspec.Struct, frozen=True):
    """The virtual hardware of a VM."""

    devices: Devices = Devices()


class _VmiSpec(msgspec.Struct, frozen=True):
    domain: Domain = Domain()


class _Template(msgspec.Struct, frozen=True):
    spec: _VmiSpec = _VmiSpec()


class _Templated(msgspec.Struct, frozen=True):
    template: _Template = _Template()


class _VirtualMachineTemplate(msgspec.Struct, frozen=True):
    spec: _Templated = _Templated()


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    virtual_machine_template: _VirtualMachineTemplate = _VirtualMachineTemplate()


class _Revised(msgspec.Struct, frozen=True):
    spec: Devices | str | None = None
    """A string in the oldest revisions, which are not decoded."""


class _VmiStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    node_name: str = ""


class VirtualMachineInstance(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance (VMI): a VM that runs or starts."""

    metadata: Metadata
    spec: _VmiSpec = _VmiSpec()
    status: _VmiStatus = _VmiStatus()

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
    spec: _Templated = _Templated()

    @property
    def devices(self) -> Devices:
        """The devices that each VM requests."""
        return self.spec.template.spec.domain.devices


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

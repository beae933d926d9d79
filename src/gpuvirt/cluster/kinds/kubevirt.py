"""KubeVirt's kinds, and that of the operator that may own them: where they lie, and the fields that are read.

Source: KubeVirt's API `kubevirt.io/v1` and the API `hco.kubevirt.io/v1beta1` of the HyperConverged Cluster Operator
(HCO), which all its versions serve. What names devices is read of machines, and nothing else.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from gpuvirt.cluster.client import Collection
from gpuvirt.cluster.resources import KubernetesObject, Metadata, Resource
from gpuvirt.model.doctor.kubevirt import MediatedDevices, Spec, Status

KUBEVIRTS = Resource("kubevirts", "kubevirt.io")
HYPER_CONVERGEDS = Resource("hyperconvergeds", "hco.kubevirt.io", "v1beta1")


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    """Whose an object is."""

    api_version: str = ""
    kind: str = ""
    name: str = ""


class OwnedMetadata(Metadata, frozen=True, rename="camel"):
    """Metadata with who owns the object."""

    owner_references: tuple[OwnerReference, ...] = ()


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
    """HCO does not hand it on to KubeVirt."""


class HcoPermittedHostDevices(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What HCO has KubeVirt permit; a list has each selector once, by which the API server tells entries apart."""

    pci_host_devices: tuple[HcoPermitted, ...] | None = None
    mediated_devices: tuple[HcoPermitted, ...] | None = None
    usb_host_devices: tuple[HcoPermitted, ...] | None = None


class HcoGates(msgspec.Struct, frozen=True, kw_only=True):
    """HCO's own switches; KubeVirt's gates for devices are always on under it."""

    disable_mdev_configuration: bool | None = msgspec.field(name="disableMDevConfiguration", default=None)
    """Later HCOs keep `mediatedDevicesConfiguration.enabled` in step with it."""


class HcoSpec(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """`spec`."""

    permitted_host_devices: HcoPermittedHostDevices | None = None
    mediated_devices_configuration: MediatedDevices | None = None
    feature_gates: HcoGates | None = None


class HyperConverged(msgspec.Struct, frozen=True, kw_only=True):
    """One HyperConverged; a cluster has at most one."""

    metadata: OwnedMetadata
    spec: HcoSpec | None = None


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """A device that is asked for; one that a claim gives has no name."""

    device_name: str | None = None


class Devices(msgspec.Struct, frozen=True, rename="camel"):
    """What a machine asks for."""

    gpus: tuple[Device, ...] | None = None
    host_devices: tuple[Device, ...] | None = None


class _Domain(msgspec.Struct, frozen=True):
    devices: Devices = Devices()


class _HostSpec(msgspec.Struct, frozen=True):
    domain: _Domain = _Domain()


class _Template(msgspec.Struct, frozen=True):
    spec: _HostSpec = _HostSpec()


class _Templated(msgspec.Struct, frozen=True):
    template: _Template = _Template()


class _VirtualMachineTemplate(msgspec.Struct, frozen=True):
    spec: _Templated = _Templated()


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    virtual_machine_template: _VirtualMachineTemplate = _VirtualMachineTemplate()


class _Revised(msgspec.Struct, frozen=True):
    spec: Devices | str | None = None
    """A text in the oldest revisions, which are not looked into."""


class VirtualMachineInstance(msgspec.Struct, frozen=True):
    """A machine that runs, or is about to."""

    metadata: Metadata
    spec: _HostSpec = _HostSpec()

    @property
    def devices(self) -> Devices:
        """What it asks for."""
        return self.spec.domain.devices


class VirtualMachine(msgspec.Struct, frozen=True):
    """A machine, or a set of equal ones (VirtualMachineInstanceReplicaSet): both have the template in one place."""

    metadata: Metadata
    spec: _Templated = _Templated()

    @property
    def devices(self) -> Devices:
        """What it asks for."""
        return self.spec.template.spec.domain.devices


class VirtualMachinePool(msgspec.Struct, frozen=True):
    """A set of machines."""

    metadata: Metadata
    spec: _PoolSpec = _PoolSpec()

    @property
    def devices(self) -> Devices:
        """What each asks for."""
        return self.spec.virtual_machine_template.spec.template.spec.domain.devices


class Instancetype(msgspec.Struct, frozen=True):
    """A size of machines, of a namespace or of the cluster."""

    metadata: Metadata
    spec: Devices = Devices()

    @property
    def devices(self) -> Devices:
        """What machines of it ask for."""
        return self.spec


class InstancetypeRevision(msgspec.Struct, frozen=True):
    """An instance type as it was when a machine was made of it; that stands for the machine, whatever became of it."""

    metadata: Metadata
    data: _Revised | None = None

    @property
    def devices(self) -> Devices:
        """What machines of it ask for."""
        found = self.data.spec if self.data is not None else None
        return found if isinstance(found, Devices) else Devices()


class RequestsDevices(KubernetesObject, Protocol):
    """An object of any kind that names devices."""

    @property
    def devices(self) -> Devices:
        """What it requests, or what VMs of it do."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind whose objects name devices."""

    name: str
    """How messages name the kind where it is not known what its objects request."""
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
"""All kinds whose objects name devices; what follows, lists and compares them goes through these rows."""

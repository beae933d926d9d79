"""VirtualMachines and their VMIs, with the fields that a schedule reads.

Source: KubeVirt's API `kubevirt.io/v1` (staging/src/kubevirt.io/api/core/v1/types.go).
"""

import msgspec

from gpuvirt.kube.kinds.core import Condition, OwnedMetadata
from gpuvirt.kube.resources import Resource
from gpuvirt.model.workers.spec import SAVED_STRATEGY

GROUP = "kubevirt.io"
VM = "VirtualMachine"
RUNNING = "running"
DEFAULT_GRACE_S = 30
"""How long a guest has to shut down without `terminationGracePeriodSeconds` (DefaultGracePeriodSeconds)."""
FINAL = frozenset({"Succeeded", "Failed"})


class Firmware(msgspec.Struct, frozen=True):
    """The firmware settings of a VM, which its SMBIOS shows."""

    uuid: str = ""


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """A GPU or another device of the host, by the name of its resource."""

    device_name: str = ""


class Devices(msgspec.Struct, frozen=True, rename="camel"):
    """The devices of a VM that are its host's."""

    gpus: tuple[Device, ...] = ()
    host_devices: tuple[Device, ...] = ()


class Domain(msgspec.Struct, frozen=True):
    """The VM as libvirt gets it."""

    firmware: Firmware | None = None
    devices: Devices = Devices()


class VmiSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The spec of a VMI: its domain and its grace period."""

    domain: Domain = Domain()
    termination_grace_period_seconds: int | None = None

    @property
    def grace_s(self) -> int:
        """How long the guest has to shut down before KubeVirt takes the power."""
        found = self.termination_grace_period_seconds
        return DEFAULT_GRACE_S if found is None else found


class Migration(msgspec.Struct, frozen=True):
    """The latest live migration of a VMI."""

    completed: bool = False
    failed: bool = False


class VmiInterface(msgspec.Struct, frozen=True, rename="camel"):
    """A network interface of a VMI, by its pod or its guest agent."""

    ip_address: str = ""
    ip_addresses: tuple[str, ...] = ()


class VmiStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How far a VMI is."""

    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    migration_state: Migration | None = None
    interfaces: tuple[VmiInterface, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its IP addresses."""
        found = (address for card in self.interfaces for address in (card.ip_address, *card.ip_addresses))
        return tuple(address for address in found if address)


class Vmi(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance: it exists while the VM runs, starts or ends."""

    metadata: OwnedMetadata
    spec: VmiSpec = VmiSpec()
    status: VmiStatus = VmiStatus()

    @property
    def is_final(self) -> bool:
        """Whether its QEMU has ended."""
        return self.status.phase in FINAL


class Template(msgspec.Struct, frozen=True):
    """The template of a VM's VMIs."""

    spec: VmiSpec = VmiSpec()


class StateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to stop a VMI, or to start one; KubeVirt removes it when it is done."""

    action: str
    uid: str = ""


class VmSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The desired state of a VM. One of `running` and `runStrategy` is set."""

    running: bool | None = None
    run_strategy: str | None = None
    template: Template = Template()

    @property
    def strategy(self) -> str:
        """The runStrategy; `running` stands for Always and Halted."""
        if self.running is not None:
            return "Always" if self.running else "Halted"
        return self.run_strategy or "Halted"


class VmStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a VM, as KubeVirt reports it."""

    printable_status: str = ""
    run_strategy: str = ""
    """The strategy that KubeVirt has followed last."""
    state_change_requests: tuple[StateChange, ...] = ()


class Vm(msgspec.Struct, frozen=True):
    """A VirtualMachine."""

    metadata: OwnedMetadata
    spec: VmSpec = VmSpec()
    status: VmStatus = VmStatus()

    @property
    def saved(self) -> str:
        """The runStrategy that a schedule has replaced by Halted; empty if none has."""
        return self.metadata.annotations.get(SAVED_STRATEGY, "")


def controller_uid(metadata: OwnedMetadata, kind: str) -> str:
    """Return the uid of an object's controller if it is one of KubeVirt's objects of this kind; else an empty text."""
    owner = metadata.controller
    is_one = owner is not None and owner.kind == kind and owner.api_version.startswith(f"{GROUP}/")
    return owner.uid if owner is not None and is_one else ""


def virtual_machines(namespace: str) -> Resource:
    """Return the VirtualMachines of a namespace."""
    return Resource("virtualmachines", GROUP, namespace=namespace)


def instances(namespace: str) -> Resource:
    """Return the VirtualMachineInstances of a namespace."""
    return Resource("virtualmachineinstances", GROUP, namespace=namespace)


def subresources(namespace: str) -> Resource:
    """Return what virt-api serves of the VirtualMachines of a namespace: `stop`."""
    return Resource("virtualmachines", f"subresources.{GROUP}", namespace=namespace)

"""The requests to a hypervisor that runs worker VMs, and its answers.

A back end (vSphere, libvirt, KubeVirt) translates between these records and its API. A hypervisor has no precondition
on a version: a call that may still be under way may be made at any time until its sender is dead, so the caller reads
the VM again after a call of unknown outcome, and never repeats it unread.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

import msgspec

from gpuvirt.facts.notknown import NotKnown

VmKey = NewType("VmKey", str)
"""The id of a VM in calls: vSphere's instanceUuid, a libvirt domain's UUID, the UID of a KubeVirt VirtualMachine."""


class Power(StrEnum):
    """Whether a VM runs, as its hypervisor says."""

    ON = "on"
    SUSPENDED = "suspended"
    OFF = "off"
    UNKNOWN = "unknown"
    """The hypervisor knows the VM, but not its state: its host is disconnected, or the VM's files are inaccessible."""


class WorkerVm(msgspec.Struct, frozen=True):
    """One VM, as its hypervisor shows it."""

    key: VmKey
    name: str
    system_uuid: str
    """The SMBIOS system UUID in lower case, as in a Node's `status.nodeInfo.systemUUID`; empty if unknown."""
    power: Power
    vgpu_types: tuple[str, ...] = ()
    """The vGPU type of each vGPU device of the VM, as the hypervisor names it (`grid_v100-4q`)."""
    is_changing: bool = False
    """Whether the hypervisor is still carrying out a call for this VM; True as well while its power is unknown."""
    is_shutting_down: bool = False
    """Whether the change is that the guest was asked to end, and runs on: `onTimeout: Force` may take its power."""
    where: str = ""
    """Namespace and name of a VM of KubeVirt (`workers/vm-1`), whose system UUID may be derived from its name alone."""
    addresses: tuple[str, ...] = ()
    """The IP addresses of a VM of KubeVirt, which shows them while it runs."""
    instance: str = ""
    """The UID of the VMI that a VM of KubeVirt runs as; empty while it is off."""

    @property
    def full_name(self) -> str:
        """Its name in messages, with the namespace of a VM of KubeVirt."""
        return self.where or self.name


@dataclass(frozen=True, slots=True)
class VmsUnknown(NotKnown):
    """The hypervisor could not be asked, or its answer was incomplete: nothing is known about any VM."""

    code: str
    text: str


VmsReading = Mapping[VmKey, WorkerVm] | VmsUnknown
"""All VMs that the hypervisor shows to this user. A VM that is not in the mapping does not exist, or is not visible."""


class Action(StrEnum):
    """The actions with a VM that gpuvirt requests from a hypervisor."""

    SUSPEND = "suspend"
    """Save the VM's memory, with that of its vGPUs, to disk, and free its devices."""
    SHUT_DOWN = "shut-down"
    """Ask the guest to end; never a power-off."""
    POWER_OFF = "power-off"
    """Take the power away. Only after `onTimeout: Force`."""
    START = "start"
    """Resume a suspended VM, or boot one that is off."""
    SET_VGPU_TYPE = "set-vgpu-type"
    """Give a VM that is off another vGPU type."""


class VmProof(msgspec.Struct, frozen=True):
    """The proof that a VM is the one that a call is meant for, made from what both sides report.

    `schedules.matching` makes proofs, and no other module does (`tools/check_proofs.py`); a connection's child gets
    them in its orders. A proof does not age, since a hypervisor gives the key of a VM to no other VM.
    """

    vm: VmKey
    instance: str = ""
    """The UID of the VMI that was read, for a VM of KubeVirt that is on. Once it has another VMI, calls are refused."""


class Call(msgspec.Struct, frozen=True):
    """One call to a hypervisor, for a VM that is proven to be the one that is meant."""

    proof: VmProof
    action: Action
    vgpu_type: str = ""
    """The new type of `SET_VGPU_TYPE`; else empty."""

    @property
    def vm(self) -> VmKey:
        """The VM."""
        return self.proof.vm


class Accepted(msgspec.Struct, frozen=True):
    """The hypervisor has carried out the call, or has begun to: the next reading shows how far it is."""


class Refused(msgspec.Struct, frozen=True):
    """The hypervisor has certainly not carried out the call, and will not."""

    code: str
    """A code of the catalogue of reasons (`HypervisorRefused`, `NoGraphicsCapacity`, `WrongCredentials`)."""
    text: str
    """The hypervisor's own words, without credentials."""


class OutcomeUnknown(msgspec.Struct, frozen=True):
    """The call may have been carried out, or may still be until the sender is dead."""

    code: str
    text: str


Answer = Accepted | Refused | OutcomeUnknown


class Ability(msgspec.Struct, frozen=True):
    """Whether one action can be taken with one VM, before anything happens."""

    is_possible: bool | None
    """None: not proven. libvirt tells for a running domain alone whether a device blocks a suspension."""
    code: str = ""
    text: str = ""


class Abilities(msgspec.Struct, frozen=True):
    """A hypervisor's report on the actions with one VM."""

    vm: VmKey
    suspend: Ability
    shut_down: Ability
    start: Ability
    set_vgpu_type: Ability
    remarks: tuple[str, ...] = msgspec.field(default=())
    """Texts that are shown, but decide nothing: whether migration and snapshots are possible with these vGPUs."""


class Hypervisor(Protocol):
    """The connection to one hypervisor, in a disposable child process. No method raises: errors are answers."""

    async def read(self) -> VmsReading:
        """Return all VMs that the hypervisor shows to this user."""

    async def call(self, call: Call) -> Answer:
        """Make one call. The caller holds the lease at this moment."""

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with each of these VMs; changes nothing."""

    async def close(self) -> None:
        """Kill the child. Its connections are reset, so that a call that hangs is never delivered later."""

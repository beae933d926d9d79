"""The VMs on nodes with GPUs of their own whose vGPUs a phase removes: as observed, and as a status has them.

Source: KubeVirt's VirtualMachine and VirtualMachineInstance (`kubevirt.io/v1`), and its pods `virt-launcher`.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.hypervisor import Call, VmKey
from gpuvirt.model.workers.observed import LastCall
from gpuvirt.model.workers.spec import PhaseName


class VmStep(StrEnum):
    """The step of a VM: the event that it waits for."""

    WAIT = "Wait"
    """It runs, and is not stopped yet; the reason says why."""
    STOP = "Stop"
    """It has to be confirmed off."""
    STOPPED = "Stopped"
    """It was confirmed off. If an admin starts it, it is left alone until the phase ends."""
    START = "Start"
    """The phase that has stopped it has ended: it has to be seen on."""


class NodeVm(msgspec.Struct, frozen=True):
    """One VM, as the status keeps it: from before its stop until it was started again."""

    vm: VmKey
    namespace: str
    name: str
    node: NodeName
    phase: PhaseName
    """The phase whose vGPU config removes its vGPU."""
    step: VmStep
    since: datetime | None = None
    """When the step began."""
    is_held: bool = False
    """Whether the step was not done in time; it is tried again now and then."""
    is_forced: bool = False
    """Whether it was stopped against a PodDisruptionBudget."""
    reason: Reason | None = None
    """Why the step is not done."""

    @property
    def where(self) -> str:
        """Its namespace and name: `default/vm-1`."""
        return f"{self.namespace}/{self.name}"


class ObservedVm(msgspec.Struct, frozen=True):
    """One VM, as the API server shows it."""

    vm: VmKey
    namespace: str
    name: str
    is_on: bool
    """Whether it has a VMI that has devices, or gets them."""
    is_changing: bool = False
    """Whether KubeVirt is still carrying out a change."""
    is_halted: bool = False
    """Whether its runStrategy is Halted."""
    stop_refusal: Reason | None = None
    """Why it must not, or can't, be shut down; None if it can."""
    start_refusal: Reason | None = None
    """Why it can't be started once it is off; None if it can."""
    budgets: Mapping[str, int] = msgspec.field(default_factory=dict)
    """The PodDisruptionBudgets that cover it, each with the pods that may be disrupted now."""
    instance: str = ""
    """The UID of the VMI that it runs as; empty while it is off."""

    @property
    def where(self) -> str:
        """Its namespace and name: `default/vm-1`."""
        return f"{self.namespace}/{self.name}"


class BlockedGpu(msgspec.Struct, frozen=True):
    """A GPU that gets the vGPU config of the phase once its users have ended: its agent and a plan say so."""

    node: NodeName
    address: str
    vms: tuple[VmKey, ...] = ()
    """The VMs that are certainly its users."""
    others: tuple[str, ...] = ()
    """Its other users, and why each is none of these VMs."""


class ObservedVms(msgspec.Struct, frozen=True):
    """One round's observation."""

    vms: Mapping[VmKey, ObservedVm] = msgspec.field(default_factory=dict)
    unknown: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    """The namespaces whose VMs could not be read."""
    gpus: tuple[BlockedGpu, ...] = ()
    calls: Mapping[VmKey, LastCall] = msgspec.field(default_factory=dict)
    """The latest call that this controller has made for each VM."""
    rounds_since: datetime | None = None
    """The moment since which this leader has made rounds; None: deadlines count from each step's begin."""


class ChangeVm(msgspec.Struct, frozen=True):
    """Shut down or start a VM of KubeVirt; the version that is read just before is the precondition."""

    namespace: str
    name: str
    call: Call

    @property
    def text(self) -> str:
        """The log line: `asks KubeVirt for shut-down of VM default/vm-1`."""
        return f"asks KubeVirt for {self.call.action} of VM {self.namespace}/{self.name}"

"""The inputs of a transition's decisions, read in one round: workers' nodes, pods, volumes and VMs, and nodes' VMs.

Source of the fields: Kubernetes' API reference, core/v1 Node and Pod, storage/v1 VolumeAttachment,
coordination.k8s.io/v1 Lease in the namespace kube-node-lease; KubeVirt's VirtualMachine and VirtualMachineInstance
(`kubevirt.io/v1`), and its pods `virt-launcher`. Nodes' VMs are those on nodes with GPUs of their own whose vGPUs a
phase removes, as observed, and as a status has them.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.hypervisor import Abilities, Action, Answer, Call, VmKey, VmsReading, VmsUnknown
from gpuvirt.model.workers.spec import PhaseName


class WorkerNode(msgspec.Struct, frozen=True):
    """The Node object of a worker."""

    name: NodeName
    uid: str
    version: str
    """Its resourceVersion: each write of the node has it as a precondition."""
    phases: frozenset[PhaseName]
    """The phases whose workers it is one of, by its labels."""
    provider_id: str = ""
    system_uuid: str = ""
    is_unschedulable: bool = False
    cordoned_by: str = ""
    """The schedule that has cordoned it, by its annotation; empty if an admin has, or nobody."""
    is_announced: bool = False
    """Whether it has the taint of the announcement."""
    is_ready: bool = False
    renewal: str | None = None
    """`renewTime` of its Lease; None if it has no Lease."""
    renewed_at: datetime | None = None
    """`renewTime` as a time, by the node's clock."""
    cordoned_for_s: float = 0.0
    """How long this controller has seen it unschedulable."""
    types: Mapping[PhaseName, str] = msgspec.field(default_factory=dict)
    """The vGPU types that profiles of its phases give its VM."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    """Its IP addresses, internal and external."""
    vm: str = ""
    """Namespace and name of the VM of KubeVirt that it runs in, by its annotation; empty if it names none."""


class NodePod(msgspec.Struct, frozen=True):
    """A pod of a worker."""

    uid: PodUid
    namespace: str
    name: str
    is_ending: bool = False
    """Whether it is being deleted."""
    has_ended: bool = False
    is_of_daemon_set: bool = False
    is_static: bool = False
    """Whether it is the API server's view of a static pod."""
    is_bare: bool = False
    """Whether it has no controller that would create it on another node."""
    has_empty_dir: bool = False

    @property
    def where(self) -> str:
        """Its namespace and name: `default/train-0`."""
        return f"{self.namespace}/{self.name}"


class LastCall(msgspec.Struct, frozen=True):
    """The latest call that this controller has made for a VM."""

    action: Action
    answer: Answer
    age_s: float


class ScheduleObservation(msgspec.Struct, frozen=True):
    """One round's observation. A round in which the API server could not be read completely is not decided."""

    nodes: Mapping[NodeName, WorkerNode]
    """The nodes that a phase selects, and those that the status or an annotation names."""
    pods: Mapping[NodeName, tuple[NodePod, ...]]
    """The pods of each of these nodes."""
    attachments: Mapping[NodeName, tuple[str, ...]]
    """The VolumeAttachments of each of these nodes, by name."""
    vms: VmsReading
    calls: Mapping[VmKey, LastCall] = msgspec.field(default_factory=dict)
    rounds_since: datetime | None = None
    """The moment since which this leader has made rounds; None: deadlines count from each step's begin."""
    abilities: Mapping[VmKey, Abilities] | VmsUnknown = msgspec.field(default_factory=dict)
    """The possible actions on VMs that were asked about. A VM that is missing was not, or the hypervisor lacks it."""
    forbidden: Mapping[NodeName, str] = msgspec.field(default_factory=dict)
    """The nodes for which the API server has forbidden the last attempt to change or drain them, with its words."""
    claims: Mapping[VmKey, str] = msgspec.field(default_factory=dict)
    """The VMs that other schedules have matched with Nodes, each with that node and schedule, in words."""


def elapsed_s(since: datetime, now: datetime, rounds_since: datetime | None) -> float:
    """Return how long a step has taken: from its begin, or from this leader's first round if that came later.

    In the time before that, possibly no controller ran, and nothing was tried.
    """
    begin = since if rounds_since is None else max(since, rounds_since)
    return (now - begin).total_seconds()


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

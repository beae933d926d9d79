"""VgpuSchedule, `gpuvirt.io/v1alpha1`: which worker VMs run, and which vGPU configs nodes have, in which phase.

Admins write the spec, the controller that leads writes the status. `kubectl explain vgpuschedule` prints these texts.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.kube.kinds.parts import Condition, Part
from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.model.workers.connection import HypervisorKind
from gpuvirt.model.workers.observed import VmStep
from gpuvirt.model.workers.spec import Begin, Leave, OnTimeout, VmPolicy
from gpuvirt.model.workers.status import Outcome, SwitchCause, WorkerStep

GROUP, VERSION, KIND, PLURAL = "gpuvirt.io", "v1alpha1", "VgpuSchedule", "vgpuschedules"
API_VERSION = f"{GROUP}/{VERSION}"
READY, VALID, HELD, CONFIGS_KNOWN = "Ready", "Valid", "Held", "ConfigsKnown"


ALL_SCHEDULES = Resource(PLURAL, GROUP, VERSION)
"""The VgpuSchedules of all namespaces."""


def vgpu_schedules(namespace: str) -> Resource:
    """Return the VgpuSchedules of a namespace."""
    return Resource(PLURAL, GROUP, VERSION, namespace)


class SecretRef(Part, frozen=True, kw_only=True):
    """A Secret of the schedule's namespace."""

    name: Annotated[
        str,
        Meta(description="The name of a Secret with server and ca, and with user and password or certificate and key."),
    ]


class SecretPlace(Part, frozen=True, kw_only=True):
    """A hypervisor whose address and credentials are in one Secret."""

    secret_ref: SecretRef


class KubeVirtPlace(Part, frozen=True, kw_only=True):
    """Worker VMs that are KubeVirt's VirtualMachines of this cluster."""

    namespace: Annotated[str, Meta(description="The namespace of the VirtualMachines.")]


class HypervisorSpec(Part, frozen=True, kw_only=True):
    """The hypervisor that runs the worker VMs."""

    vsphere: Annotated[SecretPlace | None, Meta(description="A vCenter, or an ESXi host.")] = None
    libvirt: Annotated[SecretPlace | None, Meta(description="A host with libvirt and QEMU.")] = None
    kube_virt: Annotated[KubeVirtPlace | None, Meta(description="KubeVirt of this cluster; needs leave: ShutDown.")] = (
        None
    )

    @property
    def secret(self) -> tuple[HypervisorKind, str] | None:
        """The hypervisor with the name of its Secret; None unless exactly one that has a Secret is named."""
        places = {HypervisorKind.VSPHERE: self.vsphere, HypervisorKind.LIBVIRT: self.libvirt}
        named = [(kind, place.secret_ref.name) for kind, place in places.items() if place is not None]
        return named[0] if len(named) == 1 else None


class ProfileSpec(Part, frozen=True, kw_only=True):
    """A vGPU type of worker VMs in a phase. The type is changed while the VM is off."""

    workers: Annotated[
        LabelSelector, Meta(description="The workers of the phase that get the type. If unset: all.")
    ] = LabelSelector()
    vgpu_type: Annotated[str, Meta(description="The hypervisor's name of the type: grid_v100-16q.")]
    labels: Annotated[dict[str, str], Meta(description="Labels that the nodes get with the type.")] = msgspec.field(
        default_factory=dict
    )


class PhaseSpec(Part, frozen=True, kw_only=True):
    """One phase."""

    name: Annotated[str, Meta(description="The name of the phase: day.")]
    start: Annotated[str, Meta(description="A cron line of five fields, in timeZone: 0 7 * * 1-5.")]
    workers: Annotated[LabelSelector | None, Meta(description="The nodes whose VMs run in this phase.")] = None
    profiles: Annotated[
        tuple[ProfileSpec, ...],
        Meta(description="vGPU types of workers. The first profile that selects a worker applies."),
    ] = ()
    nodes: Annotated[
        LabelSelector | None, Meta(description="The nodes whose GPUs get vgpuConfig: nodes with GPUs of their own.")
    ] = None
    vgpu_config: Annotated[
        str | None,
        Meta(
            description="The vGPU config of nodes in this phase, as the label nvidia.com/vgpu.config names it: A10-4Q."
        ),
    ] = None
    vms: Annotated[
        VmPolicy,
        Meta(
            description="The policy for KubeVirt's VMs of these nodes whose vGPUs vgpuConfig removes. Wait: the node"
            " waits for them. Stop: they are shut down, and started again when the phase ends."
        ),
    ] = VmPolicy.WAIT

    def has_worker(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with these labels is a worker of the phase."""
        return self.workers is not None and self.workers.matches(labels)

    def configures(self, labels: Mapping[str, str]) -> bool:
        """Return whether the phase has a vGPU config for a node with these labels."""
        return self.nodes is not None and self.nodes.matches(labels)


class OverrideSpec(Part, frozen=True, kw_only=True):
    """A phase that applies for some time, instead of the phase of the cron lines."""

    phase: Annotated[str, Meta(description="The name of the phase.")]
    begin: Annotated[str, Meta(description="When the phase begins, in timeZone: 2026-12-24T12:00.")] = msgspec.field(
        name="from"
    )
    until: Annotated[str, Meta(description="When the cron lines apply again, in timeZone.")]
    by: Annotated[str, Meta(description="The user who has asked for it; gpuvirt schedule switch writes the name.")] = ""


class DrainSpec(Part, frozen=True, kw_only=True):
    """How the pods of a worker are evicted."""

    timeout: Annotated[str, Meta(description="How long evictions are tried: 10m.")] = "10m"
    on_timeout: Annotated[
        OnTimeout,
        Meta(
            description="Hold: the transition waits. Force: pods are deleted against their budgets; pods that"
            " deleteEmptyDirData and deleteBarePods keep are not."
        ),
    ] = OnTimeout.HOLD
    delete_empty_dir_data: Annotated[
        bool, Meta(description="Evict pods with emptyDir volumes, whose data is lost.")
    ] = False
    delete_bare_pods: Annotated[
        bool, Meta(description="Evict pods without a controller, which are not created again.")
    ] = False


class Spec(Part, frozen=True, kw_only=True):
    """The phases of a schedule."""

    time_zone: Annotated[str, Meta(description="A name of the IANA database: Europe/Berlin.")] = "UTC"
    hypervisor: HypervisorSpec = HypervisorSpec()
    phases: Annotated[tuple[PhaseSpec, ...], Meta(description="The phases, each with its workers or nodes.")] = ()
    overrides: Annotated[
        tuple[OverrideSpec, ...], Meta(description="Phases that apply at other times. A later entry takes precedence.")
    ] = ()
    announce: Annotated[str, Meta(description="How long before its start a phase is announced: 15m.")] = "15m"
    drain: DrainSpec = DrainSpec()
    leave: Annotated[
        Leave,
        Meta(
            description="How a worker's VM is stopped. Suspend: its memory is kept. ShutDown: the guest is shut down."
        ),
    ] = Leave.SUSPEND
    begin: Annotated[
        Begin,
        Meta(
            description="When pods of workers that leave are evicted. IfAllCanLeave: once the hypervisor refuses the"
            " leaving of none of their VMs. Anyway: at once."
        ),
    ] = Begin.IF_ALL_CAN_LEAVE
    suspend: Annotated[bool, Meta(description="Do nothing for this schedule.")] = False


class WorkerStatus(Part, frozen=True, kw_only=True):
    """One worker."""

    node: Annotated[str, Meta(description="The name of the node.")]
    node_uid: Annotated[str, Meta(description="Its uid; empty while it does not exist.")] = ""
    phases: Annotated[tuple[str, ...], Meta(description="The phases in which its VM runs.")] = ()
    types: Annotated[dict[str, str], Meta(description="The vGPU types of its VM by phase.")] = msgspec.field(
        default_factory=dict
    )
    vm: Annotated[str, Meta(description="The hypervisor's id of its VM.")] = ""
    vm_name: Annotated[str, Meta(description="The name of its VM.")] = ""
    step: Annotated[WorkerStep, Meta(description="The step that the worker is in.")] = WorkerStep.NONE
    since: Annotated[str, Meta(description="When the step began (RFC 3339).")] = ""
    renewal: Annotated[str | None, Meta(description="renewTime of its Lease when its VM was first seen on.")] = None
    held: Annotated[bool, Meta(description="Whether the step was not completed in time.")] = False
    forced: Annotated[int, Meta(description="The pods that were deleted against budgets.")] = 0
    code: Annotated[str, Meta(description="The code of the reason why the step is not completed.")] = ""
    subject: Annotated[str, Meta(description="The subject of the reason.")] = ""
    message: Annotated[str, Meta(description="The reason in words.")] = ""
    fix: Annotated[str, Meta(description="How to remove the cause.")] = ""


class NodeStatus(Part, frozen=True, kw_only=True):
    """One node with GPUs of its own, whose vGPU config follows the phase."""

    node: Annotated[str, Meta(description="The name of the node.")]
    phase: Annotated[str, Meta(description="The phase that the vGPU config is from.")]
    vgpu_config: Annotated[str, Meta(description="The vGPU config of that phase.")]
    applied: Annotated[bool, Meta(description="Whether the node's agent reports that its GPUs have it.")] = False
    code: Annotated[str, Meta(description="The code of the reason why it is not applied.")] = ""
    subject: Annotated[str, Meta(description="The subject of the reason.")] = ""
    message: Annotated[str, Meta(description="The reason in words.")] = ""
    fix: Annotated[str, Meta(description="How to remove the cause.")] = ""


class VmStatus(Part, frozen=True, kw_only=True):
    """One VM of a node with GPUs of its own, whose vGPU the vGPU config of a phase removes."""

    namespace: Annotated[str, Meta(description="The namespace of the VirtualMachine.")]
    name: Annotated[str, Meta(description="The name of the VirtualMachine.")]
    uid: Annotated[str, Meta(description="Its uid.")]
    node: Annotated[str, Meta(description="The node on which it had the vGPU.")]
    phase: Annotated[str, Meta(description="The phase that stops it; it is started when that phase ends.")]
    step: Annotated[VmStep, Meta(description="Wait, Stop, Stopped or Start.")]
    since: Annotated[str, Meta(description="When the step began (RFC 3339).")] = ""
    held: Annotated[bool, Meta(description="Whether the step was not completed in time.")] = False
    forced: Annotated[bool, Meta(description="Whether it was stopped against a PodDisruptionBudget.")] = False
    code: Annotated[str, Meta(description="The code of the reason why the step is not completed.")] = ""
    subject: Annotated[str, Meta(description="The subject of the reason.")] = ""
    message: Annotated[str, Meta(description="The reason in words.")] = ""
    fix: Annotated[str, Meta(description="How to remove the cause.")] = ""


class TransitionStatus(Part, frozen=True, kw_only=True):
    """The change of the phase that is under way."""

    phase: Annotated[str, Meta(description="The phase that begins.")]
    began: Annotated[str, Meta(description="When the change began (RFC 3339).")]
    generation: Annotated[int, Meta(description="The generation of the spec that it follows.")] = 0


class PastSwitchStatus(Part, frozen=True, kw_only=True):
    """One of the last switches, or the one under way."""

    phase: Annotated[str, Meta(description="The phase that began.")]
    before: Annotated[str, Meta(description="The phase that it left; empty for the first one.")] = ""
    began: Annotated[str, Meta(description="When the switch began (RFC 3339).")]
    ended: Annotated[str, Meta(description="When it ended (RFC 3339); empty until then.")] = ""
    outcome: Annotated[Outcome, Meta(description="UnderWay, Reached, Replaced by another switch, or GivenUp.")] = (
        Outcome.UNDER_WAY
    )
    cause: Annotated[
        SwitchCause,
        Meta(
            description="Why it began. Schedule: a cron line, or the end of an override. Override, ByHand: an override,"
            " which gpuvirt schedule switch has written (ByHand). Spec: another change of the spec. Workers: other"
            " workers. GivenUp: the phase before could not be reached."
        ),
    ]
    by: Annotated[str, Meta(description="The user who has asked for it, if the override names one.")] = ""
    evicted: Annotated[int, Meta(description="The pods that were evicted.")] = 0
    deleted: Annotated[int, Meta(description="The pods that were deleted against their budgets.")] = 0


class Status(Part, frozen=True, kw_only=True):
    """The progress of the schedule."""

    phase: Annotated[str | None, Meta(description="The phase that was reached last.")] = None
    last_switch: Annotated[
        str | None, Meta(description="When the current phase began according to the spec (RFC 3339).")
    ] = None
    next_phase: Annotated[str | None, Meta(description="The phase that begins next.")] = None
    next_switch: Annotated[str | None, Meta(description="When it begins (RFC 3339).")] = None
    announced: Annotated[str | None, Meta(description="The phase that is announced.")] = None
    transition: TransitionStatus | None = None
    given_up: Annotated[
        TransitionStatus | None,
        Meta(description="The current phase and when it began, if it can't be reached before its end."),
    ] = None
    workers: Annotated[tuple[WorkerStatus, ...], Meta(description="The workers.")] = ()
    nodes: Annotated[
        tuple[NodeStatus, ...], Meta(description="The nodes whose vGPU config the current phase sets.")
    ] = ()
    vms: Annotated[
        tuple[VmStatus, ...], Meta(description="The VMs of such nodes that a phase waits for, stops or has stopped.")
    ] = ()
    history: Annotated[tuple[PastSwitchStatus, ...], Meta(description="The last 50 switches, the newest first.")] = ()
    observed_generation: Annotated[int, Meta(description="The generation of the spec that this follows.")] = 0
    conditions: Annotated[
        tuple[Condition, ...], Meta(description="Ready, Valid, Held, and ConfigsKnown where a phase has a vGPU config.")
    ] = ()


class VgpuSchedule(msgspec.Struct, frozen=True):
    """The phases in which worker VMs and vGPU configs take turns on GPUs, and when each phase begins."""

    metadata: Metadata
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def config_phases(self) -> tuple[PhaseSpec, ...]:
        """The phases that have a vGPU config."""
        return tuple(phase for phase in self.spec.phases if phase.nodes is not None)

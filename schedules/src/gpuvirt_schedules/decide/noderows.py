"""The output of `gpuvirt schedule show` and `check` on the nodes whose vGPU config follows a schedule."""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.nodevms import VmStep
from gpuvirt.model.workers.spec import PhaseName, VmPolicy
from gpuvirt.model.workers.status import ScheduleStatus


class NodeRow(msgspec.Struct, frozen=True):
    """A node that has a vGPU config by the phase of now, as the status has it."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    applied: bool
    reason: Reason | None
    """Why it is not applied."""


class VmRow(msgspec.Struct, frozen=True):
    """A VM whose vGPU the vGPU config of a phase removes, as the status has it."""

    vm: str
    """Its namespace and name: `default/vm-1`."""
    node: NodeName
    phase: PhaseName
    """The phase that waits for it, stops it or has stopped it."""
    step: VmStep
    since: datetime | None
    held: bool
    forced: bool
    """Whether it was stopped against a PodDisruptionBudget."""
    reason: Reason | None


class GpuCheck(msgspec.Struct, frozen=True):
    """A GPU whose vGPUs would change, or that something keeps from changing."""

    address: str
    vgpus: Mapping[str, int]
    """Its vGPUs now, by type as in configs."""
    vgpus_then: Mapping[str, int] | None
    """The vGPUs that it would have while the users of now stay; None where that is not known."""
    in_the_way: tuple[str, ...]
    """The VMs, other pods and processes that use vGPUs which would go: the node waits for them."""
    reasons: tuple[str, ...]
    """Why its agent would refuse the change, or wait."""
    unknown: tuple[str, ...]
    """The facts that only the node can show."""


class NodeCheck(msgspec.Struct, frozen=True):
    """The changes that the vGPU config of one phase would make on a node, by the current report of its agent."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    reason: Reason | None
    """Why the node would not get the vGPU config, even if nobody used its vGPUs."""
    gpus: tuple[GpuCheck, ...] = ()
    unknown: tuple[str, ...] = ()
    """Why it is not known what would change on the node."""
    vms: VmPolicy = VmPolicy.WAIT
    """The policy for the VMs among the users in `in_the_way`."""

    @property
    def in_the_way(self) -> tuple[str, ...]:
        """The users for which the node would wait."""
        return tuple(dict.fromkeys(user for gpu in self.gpus for user in gpu.in_the_way))


def node_rows(status: ScheduleStatus) -> tuple[NodeRow, ...]:
    """Return the nodes with vGPU configs of a status."""
    return tuple(
        NodeRow(node.node, node.phase, node.vgpu_config, node.is_applied, node.reason) for node in status.nodes
    )


def vm_rows(status: ScheduleStatus) -> tuple[VmRow, ...]:
    """Return the VMs on nodes with vGPU configs of a status."""
    return tuple(
        VmRow(vm.where, vm.node, vm.phase, vm.step, vm.since, vm.is_held, vm.is_forced, vm.reason) for vm in status.vms
    )

"""What each node is for, and what keeps it from becoming that: labels, policy and the agent's word, concluded once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpuvirt.cluster.kinds.gpunode import READY, Gpu, GpuNode, Status
from gpuvirt.cluster.labels import (
    GPU_FEATURES,
    NODE_LABEL,
    OPERANDS_LABEL,
    PRESENT_LABEL,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    WORKLOAD_LABEL,
    deploy_label,
)
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.workload import Workload, unknown_workload
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.reasons import Reason

MOST_NAMED = 4
"""Users that a message names."""
NOT_REPORTED = "its GPUs, of which the agent has not reported yet whether they carry vGPUs"
TO_LEAVE = {
    Workload.CONTAINER: frozenset({Mode.PASSTHROUGH, Mode.VGPU, Mode.UNKNOWN}),
    Workload.PASSTHROUGH: frozenset({Mode.VGPU, Mode.UNKNOWN}),
    Workload.VGPU: frozenset[Mode](),
}
"""Modes that a node's GPUs must be out of before the operands of a workload take the place of others.

A driver for containers that starts on a node takes GPUs from VFIO drivers, and one that makes vGPUs ends the programs
behind them when it stops: both would reach into running machines. A GPU has left mode vgpu once it carries no vGPUs and
its VFs are off: the program that switches them off is in the driver's pod.
"""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the ClusterPolicy says of nodes that say nothing themselves."""

    sandboxed: bool
    """Whether nodes may be for machines at all; else all are for containers, whatever their labels say."""
    workload: Workload = Workload.CONTAINER
    origin: str = "ClusterPolicy"


@dataclass(frozen=True, slots=True)
class Placement:
    """What was concluded of one node."""

    present: bool
    """Whether it has GPUs."""
    workload: Workload | None
    """What it is for; None where its label can't be understood: then all stays as it is."""
    origin: str
    """Who says so: `label nvidia.com/gpu.workload.config`."""
    leaving: tuple[str, ...] = ()
    """GPUs that are still what the node was for before, each with who has it; until they are not, labels stay."""
    leaves_vgpus: bool = False
    """Whether one of these GPUs carries vGPUs or has VFs: the vGPU driver is needed until it does not."""
    vgpus_used: bool = False
    """Whether machines have vGPUs: the driver beneath them must stay, whatever else goes."""
    invalid: InvalidDesired | None = None
    """Why its label can't be understood."""
    operands_off: bool = False
    """Whether an admin has switched off all that runs there: `nvidia.com/gpu.deploy.operands=false`."""

    @property
    def is_unreported(self) -> bool:
        """Whether an agent that is to report of the vGPU driver's GPUs has not done so: its label stays meanwhile."""
        return self.leaving == (NOT_REPORTED,)

    @property
    def problem(self) -> Reason | None:
        """Why its label can't be understood, as a reason."""
        return self.invalid.reason if self.invalid is not None else None

    @property
    def counts(self) -> bool:
        """Whether something is to run there: only then can it be ready or not."""
        return self.present and not self.operands_off


def placement_of(labels: Mapping[str, str], gpu_node: GpuNode | None, defaults: Defaults) -> Placement:
    """Return what a node is for, by its labels and what its agent says of its GPUs."""
    gpus = gpu_node.status.gpus if gpu_node is not None and gpu_node.status is not None else ()
    workload, origin = _workload(labels, defaults)
    return Placement(
        present=_present(labels, gpus),
        workload=workload,
        origin=origin,
        vgpus_used=any(vgpu.users for gpu in gpus for vgpu in gpu.vgpus),
        invalid=unknown_workload(labels[WORKLOAD_LABEL]) if workload is None else None,
        # Beside NVIDIA's operator the same label is gpuvirt's own, and the node's agent runs.
        operands_off=labels.get(OPERANDS_LABEL) == "false" and labels.get(NODE_LABEL) != "true",
    )


def leaving(
    placement: Placement, labels: Mapping[str, str], gpu_node: GpuNode | None, *, spec_is_due: bool
) -> Placement:
    """Return a placement with the GPUs that are still what the node was for before.

    An agent that has not seen yet what is wanted (`spec_is_due`, or a spec newer than its status) may be making vGPUs.
    Where the agent has not reported, it is not known whether GPUs need the vGPU driver that runs there.
    """
    if placement.workload is None:
        return placement
    if gpu_node is None or gpu_node.status is None or not _has_looked(gpu_node.status):
        unknown = placement.workload is not Workload.VGPU and _runs_vgpu_driver(labels)
        return replace(placement, leaving=(NOT_REPORTED,), leaves_vgpus=True) if unknown else placement
    unseen = spec_is_due or gpu_node.status.observed_generation < gpu_node.metadata.generation
    gpus = tuple(gpu for gpu in gpu_node.status.gpus if _is_leaving(gpu, placement.workload, unseen=unseen))
    return replace(
        placement,
        leaving=tuple(_with_users(gpu) for gpu in gpus),
        leaves_vgpus=any(gpu.vgpus or gpu.vfs for gpu in gpus),
    )


def _has_looked(status: Status) -> bool:
    """Return whether a status says what is on the host; before its first look an agent knows of no GPU."""
    return all(one.status != "Unknown" for one in status.conditions if one.type == READY)


def _is_leaving(gpu: Gpu, workload: Workload, *, unseen: bool) -> bool:
    """Return whether a GPU is not known to have left what the node was for before; VFs under a VFIO driver are its."""
    if workload is Workload.VGPU:
        return False
    if gpu.mode == Mode.VGPU:
        return bool(gpu.vgpus) or unseen or gpu.vfs != 0
    return gpu.mode in TO_LEAVE[workload] or (gpu.mode != Mode.PASSTHROUGH and bool(gpu.vfs))


def _runs_vgpu_driver(labels: Mapping[str, str]) -> bool:
    """Return whether the vGPU driver was deployed to a node on which an agent is to report."""
    deployed = labels.get(deploy_label(VGPU_DRIVER)) == "true" or labels.get(VGPU_DRIVER_LABEL) == "true"
    return deployed and labels.get(NODE_LABEL) == "true"


def _present(labels: Mapping[str, str], gpus: Iterable[Gpu]) -> bool:
    """Return whether a node has GPUs; a label that is gone (with NFD) is no proof where an agent sees some.

    What an agent has said that does not run there any more is none either.
    """
    if any(labels.get(label) == "true" for label in GPU_FEATURES):
        return True
    agent_sees = labels.get(NODE_LABEL) == "true" and any(True for _ in gpus)
    return agent_sees and labels.get(PRESENT_LABEL) == "true"


def _workload(labels: Mapping[str, str], defaults: Defaults) -> tuple[Workload | None, str]:
    if not defaults.sandboxed:
        return Workload.CONTAINER, f"{defaults.origin} $.spec.sandboxWorkloads.enabled"
    asked = labels.get(WORKLOAD_LABEL)
    if not asked:
        return defaults.workload, f"{defaults.origin} $.spec.sandboxWorkloads.defaultWorkload"
    origin = f"label {WORKLOAD_LABEL}"
    return (Workload(asked), origin) if asked in set(Workload) else (None, origin)


def _with_users(gpu: Gpu) -> str:
    users = [*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)]
    more = f" and {len(users) - MOST_NAMED} more" if users[MOST_NAMED:] else ""
    used = f", used by {', '.join(users[:MOST_NAMED])}{more}" if users else ""
    vfs = f", {gpu.vfs} VFs on" if gpu.vfs and gpu.mode != Mode.PASSTHROUGH else ""
    return f"{gpu.address} ({gpu.mode}{vfs}{used})"

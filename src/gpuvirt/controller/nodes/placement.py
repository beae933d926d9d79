"""The workload of each node, and the GPUs that keep the node from changing it: from labels, policy and agent report."""

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.kube.kinds.gpunode import READY, ReadGpu, ReadGpuNode
from gpuvirt.kube.labels import (
    ALL,
    DEVICE_PLUGIN_LABEL,
    GPU_FEATURES,
    GPU_RESOURCES,
    NODE_LABEL,
    OPERANDS_LABEL,
    PRESENT_LABEL,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    WITH_VGPU_DRIVER,
    WORKLOAD_LABEL,
    deploy_label,
)
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.workload import Workload, unknown_workload
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.reasons import Reason, count_of

MOST_NAMED = 4
"""How many users of a GPU a message names."""
NOT_REPORTED = "its GPUs (the agent has not reported yet whether they carry vGPUs)"
TO_LEAVE = {
    Workload.CONTAINER: frozenset({Mode.PASSTHROUGH, Mode.VGPU, Mode.UNKNOWN}),
    Workload.SHARED: frozenset({Mode.PASSTHROUGH, Mode.VGPU, Mode.UNKNOWN}),
    Workload.PASSTHROUGH: frozenset({Mode.VGPU, Mode.UNKNOWN}),
    Workload.VGPU: frozenset[Mode](),
    Workload.ON_DEMAND: frozenset[Mode](),
    Workload.CLAIMS: frozenset({Mode.VGPU, Mode.UNKNOWN}),
}
"""Modes that a node's GPUs must have left before the operands of a workload replace others.

A driver for containers takes GPUs from VFIO drivers when it starts, and a vGPU driver ends the programs that serve its
vGPUs when it stops: both would break running VMs. A GPU has left mode vgpu once it carries no vGPUs and its VFs are
off. The program that switches VFs off is in the driver's pod.
"""


class Defaults(msgspec.Struct, frozen=True):
    """The ClusterPolicy's workload for nodes without a workload label."""

    sandboxed: bool
    """Whether nodes may be for VMs; if not, all nodes are for containers, whatever their labels."""
    workload: Workload = Workload.CONTAINER
    origin: str = "ClusterPolicy"


class NodePlacement(msgspec.Struct, frozen=True):
    """The workload of one node, and what delays a change of it."""

    present: bool
    """Whether the node has GPUs."""
    workload: Workload | None
    """The node's workload; None if its label is invalid: then nothing on the node changes."""
    origin: str
    """Where the workload is set: `label nvidia.com/gpu.workload.config`."""
    leaving: tuple[str, ...] = ()
    """GPUs that still serve the previous workload, each with its users. The node's labels stay until they are free."""
    leaves_vgpus: bool = False
    """Whether one of these GPUs carries vGPUs or has VFs. The vGPU driver stays until none does."""
    vgpus_used: bool = False
    """Whether VMs use vGPUs of this node. Then the vGPU driver stays, even if all other operands go."""
    invalid: InvalidDesired | None = None
    """Why the node's workload label is invalid."""
    operands_off: bool = False
    """Whether an admin has switched off all operands of the node: `nvidia.com/gpu.deploy.operands=false`."""

    other_plugin: str = ""
    """The resource that another product's device plugin offers to containers; empty if none does. gpuvirt deploys
    nothing there, since its driver would replace the one that these containers use."""

    @property
    def left_alone(self) -> str | None:
        """Why gpuvirt deploys nothing to a node that another product serves, and how to change that."""
        if not self.other_plugin or self.leaving:
            return None
        return (
            f"a device plugin that gpuvirt did not deploy offers {self.other_plugin}, so gpuvirt deploys nothing here;"
            " delete that plugin from the node for gpuvirt's parts, or keep it and label the node"
            f" {DEVICE_PLUGIN_LABEL}=false for the other parts"
        )

    @property
    def waits(self) -> str | None:
        """Why the node keeps the operands of its previous workload, with the users of its GPUs; None if it does not."""
        if not self.leaving:
            return None
        return f"the node becomes {self.workload} once these GPUs are free: {', '.join(self.leaving)}"

    @property
    def is_unreported(self) -> bool:
        """Whether the agent has not reported the vGPU driver's GPUs yet. The agent's label stays until it has."""
        return self.leaving == (NOT_REPORTED,)

    @property
    def problem(self) -> Reason | None:
        """Why the node's workload label is invalid, as a reason."""
        return self.invalid.reason if self.invalid is not None else None

    @property
    def counts(self) -> bool:
        """Whether operands run on the node. Only such a node is ready or not ready."""
        return self.present and not self.operands_off


def placement_of(
    labels: Mapping[str, str],
    gpu_node: ReadGpuNode | None,
    defaults: Defaults,
    resources: Collection[str] = frozenset(),
) -> NodePlacement:
    """Return a node's workload, by its labels, the GPUs that its agent reports, and the resources that it offers."""
    gpus = gpu_node.status.gpus if gpu_node is not None and gpu_node.status is not None else ()
    workload, origin = _workload(labels, defaults)
    return NodePlacement(
        present=_present(labels, gpus),
        workload=workload,
        origin=origin,
        vgpus_used=any(vgpu.users for gpu in gpus for vgpu in gpu.vgpus),
        invalid=unknown_workload(labels[WORKLOAD_LABEL]) if workload is None else None,
        # With --coexist gpuvirt sets this label itself, on nodes where its agent runs.
        operands_off=labels.get(OPERANDS_LABEL) == "false" and labels.get(NODE_LABEL) != "true",
        other_plugin=_other_plugin(labels, resources) if workload is Workload.CONTAINER else "",
    )


def leaving(
    placement: NodePlacement, labels: Mapping[str, str], gpu_node: ReadGpuNode | None, *, spec_is_due: bool
) -> NodePlacement:
    """Return a placement with the GPUs that still serve the node's previous workload.

    An agent may still create vGPUs if it has not read the latest spec (`spec_is_due`, or a spec newer than its status).
    If the agent has not reported, GPUs may need the vGPU driver that runs on the node. An agent runs on a node for
    passthrough or shares, or will, and on others with its label.
    """
    if placement.workload is None:
        return placement
    # An agent that has not observed its host reports no GPU, and Ready as Unknown.
    if (
        gpu_node is None
        or gpu_node.status is None
        or any(condition.type == READY and condition.status == "Unknown" for condition in gpu_node.status.conditions)
    ):
        of_agents = {Workload.PASSTHROUGH, Workload.SHARED, Workload.CLAIMS}
        is_agents = placement.workload in of_agents or labels.get(NODE_LABEL) == "true"
        runs_driver = "true" in {labels.get(deploy_label(VGPU_DRIVER)), labels.get(VGPU_DRIVER_LABEL)}
        unknown = placement.workload not in WITH_VGPU_DRIVER and is_agents and runs_driver
        return replace(placement, leaving=(NOT_REPORTED,), leaves_vgpus=True) if unknown else placement
    unseen = spec_is_due or gpu_node.status.observed_generation < gpu_node.metadata.generation
    gpus = tuple(gpu for gpu in gpu_node.status.gpus if _is_leaving(gpu, placement.workload, unseen=unseen))
    return replace(
        placement,
        leaving=tuple(_with_users(gpu) for gpu in gpus),
        leaves_vgpus=any(gpu.vgpus or gpu.vfs for gpu in gpus),
    )


def _is_leaving(gpu: ReadGpu, workload: Workload, *, unseen: bool) -> bool:
    """Return whether a GPU may still serve the previous workload; VFs of a GPU on a VFIO driver do not count.

    A container with a share restarts only while the agent runs.
    """
    if workload in WITH_VGPU_DRIVER:
        return False
    if gpu.mode == Mode.SHARED and workload is Workload.CONTAINER:
        return unseen or bool(gpu.users)
    if gpu.mode == Mode.VGPU:
        return bool(gpu.vgpus) or unseen or gpu.vfs != 0
    return gpu.mode in TO_LEAVE[workload] or (gpu.mode != Mode.PASSTHROUGH and bool(gpu.vfs))


def _present(labels: Mapping[str, str], gpus: Iterable[ReadGpu]) -> bool:
    """Return whether a node has GPUs, by the labels of NFD or discover, or by the report of an agent that runs there.

    A missing label alone proves nothing, since the labels go when NFD is removed.
    """
    if any(labels.get(label) == "true" for label in GPU_FEATURES):
        return True
    reported = labels.get(NODE_LABEL) == "true" and any(True for _ in gpus)
    return reported and labels.get(PRESENT_LABEL) == "true"


def _other_plugin(labels: Mapping[str, str], resources: Collection[str]) -> str:
    """Return the first resource of containers that a node offers before an operand was ever deployed to it.

    A node with the label of an operand has, or had, gpuvirt's or NVIDIA's operator, whose plugin offers the resource.
    """
    theirs = sorted(name for name in resources if name.startswith(GPU_RESOURCES))
    return theirs[0] if theirs and ALL.isdisjoint(labels) else ""


def _workload(labels: Mapping[str, str], defaults: Defaults) -> tuple[Workload | None, str]:
    if not defaults.sandboxed:
        return Workload.CONTAINER, f"{defaults.origin} $.spec.sandboxWorkloads.enabled"
    value = labels.get(WORKLOAD_LABEL)
    if not value:
        return defaults.workload, f"{defaults.origin} $.spec.sandboxWorkloads.defaultWorkload"
    origin = f"label {WORKLOAD_LABEL}"
    return (Workload(value), origin) if value in set(Workload) else (None, origin)


def _with_users(gpu: ReadGpu) -> str:
    users = [*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)]
    more = f" and {len(users) - MOST_NAMED} more" if users[MOST_NAMED:] else ""
    used = f", used by {', '.join(users[:MOST_NAMED])}{more}" if users else ""
    vfs = f", {count_of(gpu.vfs, 'VF')} on" if gpu.vfs and gpu.mode != Mode.PASSTHROUGH else ""
    return f"{gpu.address} ({gpu.mode}{vfs}{used})"

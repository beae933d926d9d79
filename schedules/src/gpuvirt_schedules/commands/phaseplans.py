"""The planned changes of nodes by the vGPU configs of a schedule's phases: from GpuNodes, as in `gpuvirt plan`."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.controller.nodes.resolve import ManagedMetadata
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.spec import Phase, PhaseName, Schedule
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt.plans.nodeplan import GpuPlan, plan_node
from gpuvirt_schedules.controller.configurednodes import not_followed
from gpuvirt_schedules.decide.noderows import GpuCheck, NodeCheck


class PlannedGpuNode(GpuNode, frozen=True, kw_only=True):
    """A GpuNode with all that its agent reports, and the owners of its fields."""

    metadata: ManagedMetadata


class NodeReports(msgspec.Struct, frozen=True):
    """The GpuNodes of a cluster."""

    gpu_nodes: Mapping[NodeName, PlannedGpuNode]
    unread: str | None = None
    """Why they are not known."""


async def read_reports(client: Client) -> NodeReports:
    """Return the GpuNodes; raises ApiError, except for objects that the user may not read."""
    try:
        found = (await client.list(Collection(GPU_NODES, PlannedGpuNode))).items
    except NotFoundError:
        return NodeReports({})
    except ForbiddenError as error:
        return NodeReports({}, str(error))
    return NodeReports({NodeName(gpu_node.metadata.name): gpu_node for gpu_node in found})


def node_checks(
    schedule: Schedule, nodes: Mapping[PhaseName, frozenset[NodeName]], reports: NodeReports, known: KnownConfigs
) -> Iterator[NodeCheck]:
    """Yield the changes that each phase would make on its nodes; `nodes` has the nodes of each phase."""
    for phase in schedule.phases:
        for node in sorted(nodes.get(phase.name, frozenset())):
            if phase.vgpu_config is not None:
                yield _check(node, phase, phase.vgpu_config, reports, known)


def _check(node: NodeName, phase: Phase, config: str, reports: NodeReports, known: KnownConfigs) -> NodeCheck:
    if reports.unread is not None:
        return NodeCheck(node, phase.name, config, None, unknown=(reports.unread,))
    gpu_node = reports.gpu_nodes.get(node)
    if gpu_node is None or gpu_node.spec is None:
        return NodeCheck(node, phase.name, config, reasons.no_gpu_node(node, config))
    refused = not_followed(node, config, gpu_node.metadata.owner_of("vgpuConfig"), gpu_node.spec)
    if refused is None and known.has(config) is False:
        refused = next(iter(known.faults((phase,))))
    if refused is not None:
        return NodeCheck(node, phase.name, config, refused)
    if known.has(config) is None:
        return NodeCheck(node, phase.name, config, None, unknown=(known.unread or "",))
    source = Source(Origin.GPU_NODE, f"vgpuConfig of phase {phase.name}")
    plan = plan_node(gpu_node, gpu_node.spec.mode, ConfigName(config, source), known.configs)
    if plan.problem is not None:
        refused = reasons.vgpu_config_unusable(node, config, plan.problem)
    concerned = (gpu for gpu in plan.gpus if gpu.changes or gpu.in_the_way or gpu.reasons)
    return NodeCheck(node, phase.name, config, refused, tuple(map(_gpu_check, concerned)), plan.unknown, phase.vms)


def _gpu_check(gpu: GpuPlan) -> GpuCheck:
    return GpuCheck(gpu.address, gpu.vgpus, gpu.vgpus_then, gpu.in_the_way, gpu.reasons, gpu.unknown)

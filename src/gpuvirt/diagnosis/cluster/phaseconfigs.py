"""Reads which vGPU configs the phases of VgpuSchedules have for nodes, and which types these have then."""

from collections.abc import Iterable, Iterator, Mapping

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.kinds.vgpuschedule import VALID, VgpuSchedule
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.coming import NodePhase, PhaseConfig, ScheduledNode, node_phases
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt.plans.knownconfigs import KnownConfigs, read_known_configs
from gpuvirt.plans.nodeplan import types_of
from gpuvirt.shares.awayworkers import local_time

NEVER = {str(ReasonCode.VGPU_CONFIG_OVERRIDDEN), str(ReasonCode.MODE_WITHOUT_VGPUS)}
"""Why a node gets the vGPU config of no phase."""

Labels = Mapping[NodeName, Mapping[str, str]]


async def read_phases(
    client: Client, schedules: Iterable[VgpuSchedule], labels: Labels, gpu_nodes: Mapping[NodeName, GpuNode]
) -> Mapping[NodeName, tuple[NodePhase, ...]]:
    """Return the phases with a vGPU config for each of some nodes, by their labels; raises ApiError.

    A schedule that is suspended, or has faults, gives no node another vGPU config.
    """
    found = dict[NodeName, tuple[NodePhase, ...]]()
    for schedule in schedules:
        if not schedule.config_phases or schedule.spec.suspend or _is_invalid(schedule):
            continue
        known = await read_known_configs(client, schedule.metadata.namespace)
        for node, own in labels.items():
            found[node] = (*found.get(node, ()), *_of_node(schedule, node, own, gpu_nodes.get(node), known))
    return found


def _is_invalid(schedule: VgpuSchedule) -> bool:
    return any(found.type == VALID and found.status == "False" for found in schedule.status.conditions)


def _of_node(
    schedule: VgpuSchedule, node: NodeName, labels: Mapping[str, str], gpu_node: GpuNode | None, known: KnownConfigs
) -> Iterator[NodePhase]:
    status = schedule.status
    own = next((found for found in status.nodes if found.node == node), None)
    if own is not None and own.code in NEVER:
        return
    configs = (
        PhaseConfig(
            schedule.metadata.name,
            schedule.metadata.namespace,
            PhaseName(phase.name),
            phase.vgpu_config,
            _types(gpu_node, phase.vgpu_config, known),
        )
        for phase in schedule.config_phases
        if phase.vgpu_config is not None and phase.configures(labels)
    )
    # The status is of the current phase once it names the node in it.
    waits = None if own is not None and own.applied else own.message if own is not None else "it has no status yet"
    zone, following = schedule.spec.time_zone, status.next_phase
    yield from node_phases(
        configs,
        ScheduledNode(
            PhaseName(status.phase) if status.phase is not None else None,
            PhaseName(following) if following is not None else None,
            local_time(status.next_switch, zone) if status.next_switch is not None else None,
            waits,
        ),
    )


def _types(gpu_node: GpuNode | None, config: str, known: KnownConfigs) -> frozenset[str] | None:
    """Return the types that a config gives a node; None if the config, or the node's GPUs, are not known."""
    if gpu_node is None or not known.has(config):
        return None
    source = Source(Origin.GPU_NODE, "vgpuConfig of a phase")
    return types_of(gpu_node, ConfigName(config, source), known.configs)

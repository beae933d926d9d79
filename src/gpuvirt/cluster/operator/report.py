"""What an admin asks of a cluster: for each node and each of its components, whether that is well, and why not.

The components are those that NVIDIA's operator has pods of. On nodes for machines most of them are parts of one agent,
so that their states are what the agent says of itself; the others are pods.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuvirt.cluster.kinds.conditions import Condition
from gpuvirt.cluster.kinds.gpunode import READY, GpuNode, Status
from gpuvirt.cluster.operator.names import PRESENT_LABEL, VGPU_CONFIG_LABEL, WORKLOAD_LABEL
from gpuvirt.cluster.operator.operands.site import OperandName
from gpuvirt.cluster.operator.shapes import NodeObject, OperandPod
from gpuvirt.model.workload import Workload

PLUGIN, VALIDATOR, VFIO, CARVER = (
    "sandbox-device-plugin",
    "sandbox-validator",
    "vfio-manager",
    "vgpu-device-manager",
)
PODS: Mapping[str, str] = {
    OperandName.VGPU_MANAGER: "vgpu-manager",
    OperandName.DRIVER: "driver",
    OperandName.TOOLKIT: "container-toolkit",
    OperandName.VALIDATOR: "operator-validator",
    OperandName.DEVICE_PLUGIN: "device-plugin",
    OperandName.DCGM: "dcgm",
    OperandName.DCGM_EXPORTER: "dcgm-exporter",
    OperandName.GFD: "gpu-feature-discovery",
}
WELL = "Running"
CHECKS = ("VfioPciReady", "VgpuManagerReady", "VgpuDevicesReady")


@dataclass(frozen=True, slots=True)
class Row:
    """One component on one node."""

    node: str
    workload: str
    """What the node is for, as its operands say; `-` where it has none."""
    component: str
    ready: bool
    state: str
    """`Running`, or a reason's code."""
    detail: str = ""


def rows(nodes: Iterable[NodeObject], gpu_nodes: Mapping[str, GpuNode], pods: Iterable[OperandPod]) -> tuple[Row, ...]:
    """Return the components of all nodes with GPUs, by node."""
    by_node: dict[str, list[OperandPod]] = {}
    for pod in pods:
        by_node.setdefault(pod.spec.node_name, []).append(pod)
    found = list[Row]()
    for node in sorted(nodes, key=lambda one: one.metadata.name):
        name, labels = node.metadata.name, node.metadata.labels
        if labels.get(PRESENT_LABEL) == "true":
            workload = _workload(labels)
            agent = _agent_rows(node, workload, gpu_nodes.get(name)) if workload in _MACHINES else ()
            found += [*agent, *_pod_rows(name, workload, by_node.get(name, ()))]
    return tuple(found)


_MACHINES = {str(Workload.PASSTHROUGH), str(Workload.VGPU)}


def _workload(labels: Mapping[str, str]) -> str:
    """Return what a node is for now, which may not be yet what its label wants."""
    deploys = {key for key, value in labels.items() if key.startswith("nvidia.com/gpu.deploy.") and value != "false"}
    if "nvidia.com/gpu.deploy.vgpu-device-manager" in deploys:
        return str(Workload.VGPU)
    if "nvidia.com/gpu.deploy.vfio-manager" in deploys:
        return str(Workload.PASSTHROUGH)
    if "nvidia.com/gpu.deploy.driver" in deploys:
        return str(Workload.CONTAINER)
    return labels.get(WORKLOAD_LABEL, "-")


def _agent_rows(node: NodeObject, workload: str, gpu_node: GpuNode | None) -> Iterator[Row]:
    name, status = node.metadata.name, gpu_node.status if gpu_node is not None else None
    carves = workload == Workload.VGPU
    if status is None:
        for component in (PLUGIN, VALIDATOR, CARVER if carves else VFIO):
            yield Row(
                name, workload, component, ready=False, state="NotReported", detail="its agent has not reported yet"
            )
        return
    yield _plugin(name, workload, status)
    against = [one for one in status.conditions if one.type in CHECKS and one.status != "True"]
    state, why = _first(against)
    yield Row(name, workload, VALIDATOR, ready=not against, state=state, detail=why)
    ready = [one for one in status.conditions if one.type == READY and one.status != "True"]
    done = f"{status.totals.gpus} GPUs, {status.totals.modes or 'no'} mode"
    if carves:
        done = f"{status.totals.vgpus} vGPUs, config {node.metadata.labels.get(VGPU_CONFIG_LABEL, 'default')}"
    state, why = _first(ready)
    yield Row(name, workload, CARVER if carves else VFIO, ready=not ready, state=state, detail=why or done)


def _plugin(name: str, workload: str, status: Status) -> Row:
    offered = ", ".join(
        f"{one.healthy} {one.name}" + (f" ({one.held} held)" if one.held else "")
        for one in status.resources
        if one.healthy or one.held
    )
    late = [one.name for one in status.resources if not one.registered and one.healthy]
    if late:
        detail = f"not registered: {', '.join(late)}"
        return Row(name, workload, PLUGIN, ready=False, state="NotRegistered", detail=detail)
    return Row(name, workload, PLUGIN, ready=True, state=WELL, detail=offered or "nothing to offer")


def _pod_rows(node: str, workload: str, pods: Iterable[OperandPod]) -> Iterator[Row]:
    for pod in sorted(pods, key=lambda one: one.metadata.name):
        component = PODS.get(pod.app)
        if component is not None:
            ready = pod.status.ready
            state, why = (WELL, "") if ready else (pod.status.phase or "Unknown", pod.status.held_up_by)
            yield Row(node, workload, component, ready=ready, state=state, detail=why)


def _first(against: Sequence[Condition]) -> tuple[str, str]:
    return (against[0].reason, against[0].message) if against else (WELL, "")

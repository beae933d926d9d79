"""Turns pods and nodes of the API server into the evidence that `gpuvirt why` decides from."""

from collections.abc import Iterable, Mapping

from gpuvirt.diagnosis.clusternodes import IOMMUFD_RESOURCE, ClusterNode
from gpuvirt.diagnosis.vms.vmevidence import DeviceSeen, GpuNodeSeen, NodeSeen, OfferSeen, PodSeen
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import ENDED, Placement
from gpuvirt.kube.kinds.gpunode import Gpu, GpuNode, ReasonStatus, SharesStatus, Vgpu
from gpuvirt.kube.kinds.kubevirt import Vmi
from gpuvirt.model.reasons import with_code
from gpuvirt.model.shares.quantities import whole_amounts

LAUNCHER_LABEL, LAUNCHER = "kubevirt.io", "virt-launcher"
VM_LABEL = "vm.kubevirt.io/name"
CREATOR_LABEL = "kubevirt.io/created-by"
"""The label of a virt-launcher pod with the uid of its VMI."""


def pod_seen(pod: core.WholePod) -> PodSeen:
    """Return the evidence about a pod."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    waiting = (status.state.waiting for status in statuses)
    messages = (f"{state.reason}: {state.message}" if state.message else state.reason for state in waiting if state)
    labels = pod.metadata.labels
    return PodSeen(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        phase=pod.status.phase,
        node=pod.spec.node_name,
        reason=pod.status.reason,
        message=pod.status.message,
        waiting=next(messages, ""),
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        requests=_extended(pod.spec),
        placement=Placement(pod.spec.node_selector, pod.spec.tolerations),
        conditions=pod.status.conditions,
        vm=labels.get(VM_LABEL, "") if labels.get(LAUNCHER_LABEL) == LAUNCHER else "",
    )


def launcher_of(pods: Iterable[core.WholePod], vm: str, vmi: Vmi | None) -> core.WholePod | None:
    """Return the virt-launcher pod of a VM: a running one, and during a migration the one on the VMI's node."""
    uid, node = (vmi.metadata.uid, vmi.status.node_name) if vmi is not None else ("", "")

    def rank(pod: core.WholePod) -> tuple[bool, bool, str]:
        has_guest = node != "" and pod.spec.node_name == node
        return pod.status.phase not in ENDED, has_guest, pod.metadata.creation_timestamp

    labels = {VM_LABEL: vm, **({CREATOR_LABEL: uid} if uid else {})}
    found = (pod for pod in pods if labels.items() & pod.metadata.labels.items())
    return max(found, key=rank, default=None)


def node_seen(node: core.Node, gpu_node: GpuNode | None) -> NodeSeen:
    """Return the evidence about a node, with its GpuNode."""
    ready = core.condition(node.status.conditions, "Ready")
    return NodeSeen(
        name=node.metadata.name,
        ready=ready is None or ready.status == "True",
        unschedulable=node.spec.unschedulable,
        labels=node.metadata.labels,
        taints=node.spec.taints,
        allocatable=_amounts(node.status.allocatable),
        gpu_node=_gpu_node(gpu_node) if gpu_node is not None else None,
    )


def cluster_node(node: core.Node) -> ClusterNode:
    """Return the evidence about a node on which KubeVirt runs VMs."""
    count = node.status.allocatable.get(IOMMUFD_RESOURCE)
    return ClusterNode(
        node.metadata.name, node.status.node_info.kernel_version, None if count is None else count != "0"
    )


def _sharing(shares: SharesStatus) -> str:
    return f"{shares.enforcement} ({shares.origin})"


def _gpu_node(found: GpuNode) -> GpuNodeSeen:
    status, spec = found.status, found.spec
    gpus = status.gpus if status is not None else ()
    return GpuNodeSeen(
        offers=tuple(
            OfferSeen(
                resource.name,
                resource.healthy,
                resource.registered,
                resource.pci_vendor_selectors,
                resource.mdev_name_selectors,
            )
            for resource in (status.resources if status is not None else ())
        ),
        devices=(
            *(_device(gpu.address, gpu.name or gpu.address, gpu) for gpu in gpus),
            *(_device(vgpu.id, vgpu.type, vgpu) for gpu in gpus for vgpu in gpu.vgpus),
        ),
        sharing=_sharing(status.shares) if status is not None and status.shares is not None else None,
        withheld={
            withheld.resource: with_code(withheld.code, withheld.message)
            for withheld in (spec.withheld if spec is not None else ())
        },
    )


def _device(device: str, name: str, found: Gpu | Vgpu) -> DeviceSeen:
    return DeviceSeen(device, name, found.offered_as, found.users, tuple(_text(reason) for reason in found.reasons))


def _text(why: ReasonStatus) -> str:
    return with_code(why.code, why.message)


def _extended(spec: core.WholePodSpec) -> dict[str, int]:
    """Return the extended resources of a pod: the sum of its containers, or of an init container if more."""
    counts: dict[str, int] = {}
    for container in spec.containers:
        for name, count in _limits(container).items():
            counts[name] = counts.get(name, 0) + count
    for container in spec.init_containers:
        for name, count in _limits(container).items():
            counts[name] = max(counts.get(name, 0), count)
    return counts


def _limits(container: core.Container) -> dict[str, int]:
    return {name: amount for name, amount in _amounts(container.resources.limits).items() if amount}


def _amounts(quantities: Mapping[str, str | float]) -> dict[str, int]:
    """Return the amounts of extended resources."""
    return whole_amounts({name: quantity for name, quantity in quantities.items() if "/" in name})

"""VMs, VMIs, pods and nodes as the API server has them, turned into the evidence that `gpuvirt why` decides from."""

from collections.abc import Iterable

from gpuvirt.cluster.kinds import core, vmstate
from gpuvirt.cluster.kinds.core import ENDED
from gpuvirt.cluster.kinds.gpunode import Gpu, GpuNode, Vgpu, Why
from gpuvirt.cluster.kinds.kubevirt import Devices
from gpuvirt.model.doctor.vms.vmevidence import (
    ConditionSeen,
    DeviceRequests,
    DeviceSeen,
    GpuNodeSeen,
    NodeSeen,
    OfferSeen,
    Placement,
    PodSeen,
    Taint,
    Toleration,
    VmiSeen,
    VmSeen,
)

LAUNCHER_LABEL, LAUNCHER = "kubevirt.io", "virt-launcher"
VM_LABEL = "vm.kubevirt.io/name"
CREATOR_LABEL = "kubevirt.io/created-by"
"""The VMI of a virt-launcher pod, by its uid."""


def vm_seen(vm: vmstate.Vm, instancetype: Devices | None = None) -> VmSeen:
    """Return a VM; `instancetype` is what its instance type requests."""
    spec = vm.spec
    strategy = spec.run_strategy or ("Always" if spec.running else "Halted")
    own, more = requests_of(spec.template.spec.domain.devices), requests_of(instancetype or Devices())
    return VmSeen(
        run_strategy=strategy,
        status=vm.status.printable_status,
        has_run_strategy=spec.running is None,
        requests=DeviceRequests((*own.gpus, *more.gpus), (*own.host_devices, *more.host_devices)),
        placement=_placement(spec.template.spec),
        conditions=_conditions(vm.status.conditions),
    )


def vmi_seen(vmi: vmstate.Vmi) -> VmiSeen:
    """Return a VMI."""
    return VmiSeen(
        phase=vmi.status.phase,
        node=vmi.status.node_name,
        requests=requests_of(vmi.spec.domain.devices),
        placement=_placement(vmi.spec),
        conditions=_conditions(vmi.status.conditions),
    )


def pod_seen(pod: core.RequestingPod) -> PodSeen:
    """Return a pod."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    waiting = (one.state.waiting for one in statuses)
    said = (f"{one.reason}: {one.message}" if one.message else one.reason for one in waiting if one is not None)
    labels = pod.metadata.labels
    return PodSeen(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        phase=pod.status.phase,
        node=pod.spec.node_name,
        reason=pod.status.reason,
        message=pod.status.message,
        waiting=next(said, ""),
        gates=tuple(one.name for one in pod.spec.scheduling_gates),
        requests=_extended(pod.spec),
        placement=_placement(pod.spec),
        conditions=_conditions(pod.status.conditions),
        vm=labels.get(VM_LABEL, "") if labels.get(LAUNCHER_LABEL) == LAUNCHER else "",
    )


def launcher_of(pods: Iterable[core.RequestingPod], vm: str, vmi: vmstate.Vmi | None) -> core.RequestingPod | None:
    """Return the virt-launcher pod of a VM: one that has not ended, and of a migration the one that has the guest."""
    uid, node = (vmi.metadata.uid, vmi.status.node_name) if vmi is not None else ("", "")

    def rank(pod: core.RequestingPod) -> tuple[bool, bool, str]:
        has_guest = node != "" and pod.spec.node_name == node
        return pod.status.phase not in ENDED, has_guest, pod.metadata.creation_timestamp

    labels = {VM_LABEL: vm, **({CREATOR_LABEL: uid} if uid else {})}
    found = (pod for pod in pods if labels.items() & pod.metadata.labels.items())
    return max(found, key=rank, default=None)


def node_seen(node: core.Node, gpu_node: GpuNode | None) -> NodeSeen:
    """Return a node with what its agent reports."""
    ready = next((one for one in node.status.conditions if one.type == "Ready"), None)
    return NodeSeen(
        name=node.metadata.name,
        ready=ready is None or ready.status == "True",
        unschedulable=node.spec.unschedulable,
        labels=node.metadata.labels,
        taints=tuple(Taint(one.key, one.effect, one.value) for one in node.spec.taints),
        allocatable={
            name: int(count) for name, count in node.status.allocatable.items() if "/" in name and count.isdecimal()
        },
        gpu_node=_gpu_node(gpu_node) if gpu_node is not None else None,
    )


def requests_of(devices: Devices) -> DeviceRequests:
    """Return what a VM's or VMI's devices are; one that a claim gives has no name, and is left out."""
    return DeviceRequests(
        tuple(one.device_name for one in devices.gpus or () if one.device_name),
        tuple(one.device_name for one in devices.host_devices or () if one.device_name),
    )


def _gpu_node(found: GpuNode) -> GpuNodeSeen:
    status, spec = found.status, found.spec
    gpus = status.gpus if status is not None else ()
    return GpuNodeSeen(
        offers=tuple(
            OfferSeen(one.name, one.healthy, one.registered, one.pci_vendor_selectors, one.mdev_name_selectors)
            for one in (status.resources if status is not None else ())
        ),
        devices=(
            *(_device(gpu.address, gpu.name or gpu.address, gpu) for gpu in gpus),
            *(_device(vgpu.id, vgpu.type, vgpu) for gpu in gpus for vgpu in gpu.vgpus),
        ),
        withheld={one.resource: f"{one.code}: {one.message}" for one in (spec.withheld if spec is not None else ())},
    )


def _device(device: str, name: str, found: Gpu | Vgpu) -> DeviceSeen:
    return DeviceSeen(device, name, found.offered_as, found.users, tuple(_text(one) for one in found.reasons))


def _text(why: Why) -> str:
    return why.message if why.message.startswith(f"{why.code}:") else f"{why.code}: {why.message}"


def _extended(spec: core.RequestingPodSpec) -> dict[str, int]:
    """Return the extended resources of a pod: the sum of its containers, or what an init container needs alone."""
    counts: dict[str, int] = {}
    for container in spec.containers:
        for name, count in _limits(container).items():
            counts[name] = counts.get(name, 0) + count
    for container in spec.init_containers:
        for name, count in _limits(container).items():
            counts[name] = max(counts.get(name, 0), count)
    return counts


def _limits(container: core.Container) -> dict[str, int]:
    limits = container.resources.limits.items()
    return {name: int(count) for name, count in limits if "/" in name and str(count).isdecimal() and int(count)}


def _placement(spec: vmstate.VmiSpec | core.RequestingPodSpec) -> Placement:
    tolerations = tuple(Toleration(one.key, one.operator or "Equal", one.value, one.effect) for one in spec.tolerations)
    return Placement(spec.node_selector, tolerations)


def _conditions(found: Iterable[core.Condition]) -> tuple[ConditionSeen, ...]:
    return tuple(ConditionSeen(one.type, one.status, one.reason, one.message) for one in found)

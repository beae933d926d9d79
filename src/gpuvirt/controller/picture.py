"""The picture of the cluster that the controller decides by: its collections as observed at one moment."""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.controller.deployment import Existing, StoredObject
from gpuvirt.controller.kubevirt.decisions import KubeVirtObserved
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, ScheduledConfigs
from gpuvirt.controller.store import Objects
from gpuvirt.kube.kinds.clusterpolicy import StoredPolicy
from gpuvirt.kube.kinds.core import Pod, ReadNode, Service
from gpuvirt.kube.labels import PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS
from gpuvirt.kube.objects import ObjectKey

PAUSERS = {
    "nvidia-vgpu-device-manager": PAUSED_FOR_VGPUS,
    "nvidia-driver-daemonset": PAUSED_FOR_DRIVER,
    "nvidia-vgpu-manager-daemonset": PAUSED_FOR_DRIVER,
}
"""The pause that pods put on other operands of their node, by label `app`; driver pods do so until they are ready."""


class Picture(msgspec.Struct, frozen=True):
    """The observed collections. The controller makes a picture once all of them are observed."""

    policies: Objects[StoredPolicy]
    nodes: Objects[ReadNode]
    gpu_nodes: Objects[OwnedGpuNode]
    existing: Existing
    """The operands' objects in the cluster, and all ConfigMaps of the controller's namespace."""
    other_operator: str | None = None
    """The lease of NVIDIA's operator if that runs: `lease gpu-operator/53822513.nvidia.com, held by ...`."""
    kubevirt: KubeVirtObserved = msgspec.field(default_factory=KubeVirtObserved)
    services: Objects[Service] = msgspec.field(default_factory=dict)
    """The extender's Service, if it exists and the controller writes the scheduler's configuration."""
    scheduled: ScheduledConfigs = msgspec.field(default_factory=ScheduledConfigs)
    """The vGPU configs that VgpuSchedules have for nodes at this moment."""

    def entries_of(self, config_map: str) -> tuple[str, ...] | None:
        """Return the keys of a ConfigMap; None if no ConfigMap has this name."""
        texts = self.texts_of(config_map)
        return tuple(texts) if texts is not None else None

    def texts_of(self, config_map: str) -> Mapping[str, str] | None:
        """Return the data of a ConfigMap; None if no ConfigMap has this name."""
        found = next((stored for key, stored in self._config_maps() if key.name == config_map), None)
        return (found.texts or {}) if found is not None else None

    def config_maps_with(self, key: str) -> tuple[str, ...]:
        """Return the names of the ConfigMaps with this key."""
        return tuple(sorted(at.name for at, found in self._config_maps() if key in (found.texts or {})))

    def _config_maps(self) -> Iterable[tuple[ObjectKey, StoredObject]]:
        stored = (objects for resource, objects in self.existing.stored.items() if resource.plural == "configmaps")
        return next(stored, {}).items()


def read_of(node: ReadNode) -> tuple[object, ...]:
    """Return what the controller reads of a node. The kubelet changes the rest every 10 s, as with its conditions."""
    metadata, status = node.metadata, node.status
    return (
        metadata.name,
        metadata.labels,
        metadata.annotations,
        node.resources,
        status.capacity.keys(),
        status.node_info.container_runtime_version,
    )


def read_of_gpu_node(gpu_node: OwnedGpuNode) -> tuple[object, ...]:
    """Return what the controller reads of a GpuNode: all that it keeps of it but the version."""
    metadata = gpu_node.metadata
    return metadata.uid, metadata.generation, metadata.managed_fields, gpu_node.spec, gpu_node.status


def read_of_pod(pod: Pod) -> tuple[object, ...]:
    """Return what the controller reads of an operand's pod. The kubelet changes the rest, as times and addresses."""
    metadata, status = pod.metadata, pod.status
    leaves = bool(metadata.deletion_timestamp)
    return metadata.uid, leaves, metadata.labels, pod.spec.node_name, status.ready, status.waiting_reason


class OperandPods(msgspec.Struct, frozen=True):
    """The facts about the pods of operands on one node that its decisions depend on."""

    apps: frozenset[str] = frozenset()
    """The operands that have a pod on the node, by their label `app`."""
    pauses: frozenset[str] = frozenset()
    """The pauses that running pods put on other operands."""


NO_PODS = OperandPods()


def pods_by_node(pods: Iterable[Pod]) -> dict[str, OperandPods]:
    """Return the pods of each node that has some."""
    found: dict[str, OperandPods] = {}
    for pod in pods:
        if pod.app and (name := pod.spec.node_name):
            before, pauses = found.get(name, NO_PODS), PAUSERS.get(pod.app)
            at_work = pauses is not None and (pauses == PAUSED_FOR_VGPUS or not pod.status.ready)
            also = before.pauses | {pauses} if at_work and pauses is not None else before.pauses
            found[name] = OperandPods(before.apps | {pod.app}, also)
    return found

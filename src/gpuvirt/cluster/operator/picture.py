"""What all decisions are made from: every collection that matters, as it is known at one moment."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuvirt.cluster.kinds.clusterpolicy import StoredPolicy
from gpuvirt.cluster.kinds.core import Node, Pod
from gpuvirt.cluster.labels import PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.operator.deployment.decisions import There
from gpuvirt.cluster.operator.deployment.drift import StoredObject
from gpuvirt.cluster.operator.kubevirt.decisions import KubeVirtObserved
from gpuvirt.cluster.operator.nodes.resolve import OwnedGpuNode
from gpuvirt.cluster.operator.store import Objects

PAUSERS = {
    "nvidia-vgpu-device-manager": PAUSED_FOR_VGPUS,
    "nvidia-driver-daemonset": PAUSED_FOR_DRIVER,
    "nvidia-vgpu-manager-daemonset": PAUSED_FOR_DRIVER,
}
"""Pods, by their label `app`, that pause others on their node; those of a driver do so until they are ready."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All of it; nothing is decided before all of it was heard."""

    policies: Objects[StoredPolicy]
    nodes: Objects[Node]
    gpu_nodes: Objects[OwnedGpuNode]
    there: There
    """What is there of operands, and the ConfigMaps beside them."""
    other_operator: str | None = None
    """NVIDIA's operator, where it runs: `lease gpu-operator/53822513.nvidia.com, held by ...`."""
    kubevirt: KubeVirtObserved = field(default_factory=KubeVirtObserved)

    def entries_of(self, config_map: str) -> tuple[str, ...] | None:
        """Return the keys of a ConfigMap's entries, None where there is none of that name."""
        found = next((one for key, one in self._config_maps() if key.name == config_map), None)
        return _keys_of(found) if found is not None else None

    def config_maps_with(self, key: str) -> tuple[str, ...]:
        """Return the names of the ConfigMaps that have an entry of that key."""
        return tuple(sorted(at.name for at, found in self._config_maps() if key in _keys_of(found)))

    def _config_maps(self) -> Iterable[tuple[ObjectKey, StoredObject]]:
        stored = (objects for resource, objects in self.there.stored.items() if resource.plural == "configmaps")
        return next(stored, {}).items()


def _keys_of(config_map: StoredObject) -> tuple[str, ...]:
    return tuple(config_map.texts or {})


def apps_by_node(pods: Iterable[Pod]) -> dict[str, frozenset[str]]:
    """Return which operands have a pod on which node, by their label `app`."""
    found: dict[str, frozenset[str]] = {}
    for pod in pods:
        if pod.app and pod.spec.node_name:
            found[pod.spec.node_name] = found.get(pod.spec.node_name, frozenset()) | {pod.app}
    return found


def pausers_by_node(pods: Iterable[Pod]) -> dict[str, frozenset[str]]:
    """Return what pauses others on which node now."""
    found: dict[str, frozenset[str]] = {}
    for pod in pods:
        pauses = PAUSERS.get(pod.app)
        at_work = pauses == PAUSED_FOR_VGPUS or not pod.status.ready
        if pauses is not None and at_work and pod.spec.node_name:
            found[pod.spec.node_name] = found.get(pod.spec.node_name, frozenset()) | {pauses}
    return found

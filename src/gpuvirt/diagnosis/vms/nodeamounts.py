"""The amounts of the requested resources on a node: counted by its kubelet, free, and in other phases."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.diagnosis.vms.vmevidence import PodSeen
from gpuvirt.model.workers.coming import NodePhase


class NodeAmounts(msgspec.Struct, frozen=True):
    """The amounts of one node."""

    requests: Mapping[str, int]
    """The amounts that the VM or pod requests, by the name of the resource."""
    counted: Mapping[str, int]
    """The amounts that the node's kubelet counts as allocatable."""
    pods: Sequence[PodSeen] | None
    """The pods of the node; None where the cluster's pods could not be read."""
    phases: Sequence[NodePhase]
    """The phases of schedules that change the node's resources."""

    def allocatable(self, name: str) -> int:
        """Return how many devices of a resource the node's kubelet counts."""
        return self.counted.get(name, 0)

    def free(self, name: str) -> int:
        """Return how many devices of a resource no pod requests."""
        requested = sum(pod.requests.get(name, 0) for pod in self.pods or ())
        return max(self.allocatable(name) - requested, 0)

    def fewest_ends(self) -> int:
        """Return how many pods have to end so that each requested resource is free, at the least."""
        most = 0
        for name, count in self.requests.items():
            free, number = self.free(name), 0
            for used in sorted((pod.requests.get(name, 0) for pod in self.pods or ()), reverse=True):
                if free >= count:
                    break
                free, number = free + used, number + 1
            most = max(most, number)
        return most

    def missing(self) -> Iterator[tuple[str, int]]:
        """Yield the requested resources of which the node's kubelet counts too few devices, with its count."""
        for name, count in self.requests.items():
            counted = self.allocatable(name)
            if counted < count and self.phase_of(name) is None:
                yield name, counted

    def phase_of(self, name: str) -> NodePhase | None:
        """Return the phase in which the node offers a resource that it does not offer now."""
        if self.allocatable(name):
            return None
        return next((phase for phase in self.phases if phase.brings(name)), None)


def pods_by_node(pods: Iterable[PodSeen]) -> Mapping[str, Sequence[PodSeen]]:
    """Return the pods by the node that they are bound to."""
    by_node: dict[str, list[PodSeen]] = {}
    for pod in pods:
        by_node.setdefault(pod.node, []).append(pod)
    return by_node

"""The pods with units that kube-scheduler has nominated for a node (`status.nominatedNodeName`) and not bound yet."""

from collections.abc import Container, Mapping, Sequence

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.nomination import Nomination
from gpuvirt.shares.objects import SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing


class Nominations:
    """The nominations by node, kept by the events of pods."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._nodes: dict[PodUid, NodeName] = {}
        self._by_node: dict[NodeName, dict[PodUid, Nomination]] = {}

    def take(self, pod: SharingPod) -> None:
        """Record a pod: a nomination, one for another node, or the end of one by a binding or a deletion."""
        self.drop(pod.uid)
        name = NodeName(pod.status.nominated_node_name)
        if not name or pod.spec.node_name or pod.metadata.deletion_timestamp:
            return
        try:
            demand = demand_of_pod(pod, self._sharing.resource, self._sharing.whole)
        except GpuvirtError:
            return
        if demand.containers:
            nomination = Nomination(pod.uid, demand, pod.spec.priority, self._sharing.policy_of(pod), pod.where)
            self._nodes[pod.uid] = name
            self._by_node.setdefault(name, {})[pod.uid] = nomination

    def drop(self, pod: PodUid) -> None:
        """Remove a pod that is gone or no longer nominated."""
        if (name := self._nodes.pop(pod, None)) is not None:
            nominations = self._by_node[name]
            del nominations[pod]
            if not nominations:
                del self._by_node[name]

    def for_pod(self, pod: SharingPod, bound: Container[PodUid] = ()) -> Mapping[NodeName, Sequence[Nomination]]:
        """Return the nominations that count for a pod, by node: those of other pods of no lower priority.

        Of equal priorities on the pod's own nominated node, the one of the lower UID counts. Pods in `bound` count
        elsewhere.
        """
        if not self._by_node:
            return {}
        own, rank = self._nodes.get(pod.uid), (-pod.spec.priority, pod.uid)
        found = {
            name: [
                nomination
                for nomination in nominations.values()
                if nomination.pod not in bound
                and nomination.pod != pod.uid
                and (nomination.rank < rank if name == own else nomination.priority >= pod.spec.priority)
            ]
            for name, nominations in self._by_node.items()
        }
        return {name: counted for name, counted in found.items() if counted}

"""The pods of the agent's node that have ended or are being deleted, by the API server.

The ids of their on-demand vGPUs are withdrawn at once, so that the kubelet gives them to no other pod. Other ids are
listed in the place of those of pods that have ended.
"""

from collections.abc import Callable

from gpuvirt.cluster.agent.podshares import NodePod
from gpuvirt.cluster.cache import Delta
from gpuvirt.facts.ids import PodUid
from gpuvirt.model.offers.ondemand.podends import PodEnds


class EndingPods:
    """Tells the agent which pods end, as the API server reports them.

    A pod that the API server lacks has ended only if the API server had it before, or if the ledger had it before the
    first list: the kubelet may start a pod before this watch reports it.
    """

    def __init__(self, on_demand_pods: Callable[[], frozenset[PodUid]], observe: Callable[[PodEnds], None]) -> None:
        """`on_demand_pods` returns the pods that have on-demand vGPUs."""
        self._on_demand_pods = on_demand_pods
        self._observe = observe
        self._seen = on_demand_pods()
        """The pods that exist, and those with on-demand vGPUs that are gone."""

    def observe(self, delta: Delta[NodePod]) -> None:
        """Take all pods of the node."""
        pods = {pod.kubelet_uid: pod for pod in delta.objects.values()}
        gone = self._seen - pods.keys()
        self._seen = (gone & self._on_demand_pods()) | pods.keys()
        ended = gone | {uid for uid, pod in pods.items() if pod.has_ended}
        self._observe(PodEnds(ended, frozenset(uid for uid, pod in pods.items() if pod.is_ending) - ended))

"""The pods that keep gpuvirt from being uninstalled: their containers have shares of GPUs.

A container with a share restarts only while the agent of its node runs: the kubelet asks the agent before each start.
"""

from collections.abc import Iterable, Mapping

from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.errors import GpuvirtError

MOST_NAMED = 10
"""How many pods of a node a message names."""

PodsByNode = Mapping[str, tuple[str, ...]]
"""The pods with shares as `namespace/name`, by their nodes."""


class SharesInUseError(GpuvirtError):
    """Pods have shares of GPUs; nothing was removed."""

    def __init__(self, found: PodsByNode) -> None:
        super().__init__(
            f"pods have shares of GPUs, and their containers restart only while gpuvirt's agents run: {text_of(found)}."
            " Nothing was removed. Label these nodes nvidia.com/gpu.workload.config=container, and uninstall gpuvirt"
            " once the pods have ended; or use --force: then their containers run on, and do not start again"
        )


def by_node(pods: Iterable[SharingPod], nodes: Iterable[str]) -> PodsByNode:
    """Return the pods with shares on these nodes; extender or agent have written the annotation of each."""
    known, found = frozenset(nodes), dict[str, tuple[str, ...]]()
    for pod in sorted(pods, key=lambda pod: pod.where):
        if pod.metadata.annotations.shares and pod.spec.node_name in known:
            found[pod.spec.node_name] = (*found.get(pod.spec.node_name, ()), pod.where)
    return found


def text_of(found: PodsByNode) -> str:
    """Return the pods in a line of text: `node01: default/a, default/b; node02: ...`."""
    return "; ".join(f"{node}: {_named(pods)}" for node, pods in sorted(found.items()))


def _named(pods: tuple[str, ...]) -> str:
    more = f" and {len(pods) - MOST_NAMED} more" if pods[MOST_NAMED:] else ""
    return f"{', '.join(pods[:MOST_NAMED])}{more}"

"""The agent's pods to delete, so that the DaemonSet creates new ones: one node first, then several at a time.

The DaemonSet's strategy is OnDelete. RollingUpdate would replace the next agent as soon as one passes its probe. Here
all other nodes wait until the first node's new pod is ready, and later ones until fewer pods are unavailable.
"""

from collections.abc import Iterable, Sequence

import msgspec

from gpuvirt.kube.kinds.core import Pod
from gpuvirt.kube.labels import TEMPLATE_LABEL


class Rollout(msgspec.Struct, frozen=True):
    """The progress of replacing pods, and the pods to delete next."""

    delete: tuple[Pod, ...] = ()
    old: int = 0
    """How many pods still run an older version."""
    waits_for: str | None = None
    """The reason why the next deletion waits; None if it does not wait."""


def rollout(pods: Iterable[Pod], template: str, *, desired: int, most_unavailable: str | int) -> Rollout:
    """Return which pods to delete now.

    `template` is the label value of new pods, `desired` the desired number of pods, `most_unavailable` a number of
    nodes or a share of them (`10%`, rounded up, as for a DaemonSet). A pod that is not ready does not count as
    unavailable when it is replaced, since it serves no VM.
    """
    current = sorted((pod for pod in pods if not pod.metadata.deletion_timestamp), key=_by_node)
    new = [pod for pod in current if pod.metadata.labels.get(TEMPLATE_LABEL) == template]
    old = [pod for pod in current if pod.metadata.labels.get(TEMPLATE_LABEL) != template]
    ready_new = [pod for pod in new if pod.status.ready]
    if not old:
        return Rollout()
    allowed = _number(most_unavailable, desired)
    late = [pod for pod in new if not pod.status.ready]
    if not ready_new:
        allowed = 1  # until one new pod is ready
        if late or len(current) < desired:
            return Rollout((), len(old), _waits(late, "the first node to be upgraded"))
    ready = len(ready_new) + sum(pod.status.ready for pod in old)
    room = allowed - (desired - ready)
    unready = [pod for pod in old if not pod.status.ready]
    ready_old = [pod for pod in old if pod.status.ready]
    chosen = (*unready[: max(1, allowed)], *ready_old[: max(0, room)]) if ready_new else (*unready, *ready_old)[:1]
    return Rollout(tuple(chosen), len(old), None if chosen else _waits(late, "nodes that are being upgraded"))


def _by_node(pod: Pod) -> str:
    return pod.spec.node_name


def _waits(late: Sequence[Pod], what: str) -> str:
    if not late:
        return f"waits for {what}: Kubernetes has not created all new pods yet"
    pods = ", ".join(f"{pod.metadata.name} on {pod.spec.node_name}" for pod in late)
    return f"waits for {what}; not ready: {pods}"


def _number(most: str | int, of: int) -> int:
    """Return how many pods may be unavailable at once; at least one, since no pod would be replaced otherwise."""
    text = str(most)
    if text.endswith("%") and text[:-1].isdecimal():
        return max(1, -(-int(text[:-1]) * of // 100))
    return max(1, int(text)) if text.isdecimal() else 1

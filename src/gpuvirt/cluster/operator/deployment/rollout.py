"""Which pods of the agent to delete, so that newer ones take their places: one node first, then some at a time.

The DaemonSet's strategy is OnDelete. Were it RollingUpdate, the first bad agent would be followed by the next after
nothing more than a probe; here the second node waits until the first one's pod is ready, and all others for each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuvirt.cluster.kinds.core import Pod
from gpuvirt.cluster.labels import TEMPLATE_LABEL


@dataclass(frozen=True, slots=True)
class Rollout:
    """How far pods have been replaced, and what to do next."""

    delete: tuple[Pod, ...] = ()
    old: int = 0
    """Pods that are still of an earlier kind."""
    waits_for: str | None = None
    """What the next deletion waits for; None where none does."""


def rollout(pods: Iterable[Pod], template: str, *, desired: int, most_unavailable: str | int) -> Rollout:
    """Return which pods to delete now.

    `template` is what new pods carry, `desired` how many there are to be, `most_unavailable` a number of nodes or a
    share of them (`10%`, rounded up, as for a DaemonSet). A pod that is not ready is replaced without counting: it
    serves nobody.
    """
    there = sorted((pod for pod in pods if not pod.metadata.deletion_timestamp), key=_by_node)
    new = [pod for pod in there if pod.metadata.labels.get(TEMPLATE_LABEL) == template]
    old = [pod for pod in there if pod.metadata.labels.get(TEMPLATE_LABEL) != template]
    ready_new = [pod for pod in new if pod.status.ready]
    if not old:
        return Rollout()
    allowed = _number(most_unavailable, desired)
    late = [pod for pod in new if not pod.status.ready]
    if not ready_new:
        allowed = 1  # one node first
        if late or len(there) < desired:
            return Rollout((), len(old), _waits(late, "the first node to be upgraded"))
    ready = len(ready_new) + sum(pod.status.ready for pod in old)
    room = allowed - (desired - ready)
    ill = [pod for pod in old if not pod.status.ready]
    well = [pod for pod in old if pod.status.ready]
    chosen = (*ill[: max(1, allowed)], *well[: max(0, room)]) if ready_new else (*ill, *well)[:1]
    return Rollout(tuple(chosen), len(old), None if chosen else _waits(late, "nodes that are being upgraded"))


def _by_node(pod: Pod) -> str:
    return pod.spec.node_name


def _waits(late: Sequence[Pod], what: str) -> str:
    if not late:
        return f"waits for {what}: a new pod is being made"
    return f"waits for {what}: {', '.join(f'{pod.metadata.name} on {pod.spec.node_name}' for pod in late)} not ready"


def _number(most: str | int, of: int) -> int:
    """Return how many pods may be away at once: at least one, or nothing would ever be replaced."""
    text = str(most)
    if text.endswith("%") and text[:-1].isdecimal():
        return max(1, -(-int(text[:-1]) * of // 100))
    return max(1, int(text)) if text.isdecimal() else 1

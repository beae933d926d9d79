"""The pods that filter has just refused, and those that fit after an event that arrived too late.

kube-scheduler tries a refused pod again at the next event of the cluster, and without one after five minutes. Its watch
and the extender's are not in step: it may have seen the end of a pod, asked, and been refused by usage that did not
know of that end. The event is past for it then, so the extender wakes the pod. To answer each refusal with an error
instead would have kube-scheduler retry without end.

Source: handleSchedulingFailure and moveAllToActiveOrBackoffQueue of Kubernetes 1.36, pkg/scheduler.
"""

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpuvirt.clock import Clock
from gpuvirt.extender.filtering import filtered
from gpuvirt.extender.protocol import NodeArguments
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.model.shares.placement import Steps
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingPod
from gpuvirt.shares.sharing import Sharing

MOST = 64
"""How many refused pods are known; the oldest are forgotten. The binding of one that is woken is an event for all."""


MOST_STEPS = 3000
"""The steps by which refused pods are judged after an event. A pod of which it is not certain then that it fits is not
woken: it waits for the next event, as kube-scheduler has it."""


class _Refused(NamedTuple):
    pod: SharingPod
    names: Sequence[NodeName]
    """The nodes that kube-scheduler asked for."""
    at_s: float


class RefusedPods:
    """Remembers refusals for as long as an event may be late."""

    def __init__(self, index: Index, sharing: Sharing, clock: Clock, late_s: float) -> None:
        """`late_s`: how much later than kube-scheduler's watch this one may be."""
        self._index = index
        self._sharing = sharing
        self._clock = clock
        self._late_s = late_s
        self._refused: dict[PodUid, _Refused] = {}
        """In the order of the refusals."""
        self._fitting: dict[PodUid, SharingPod] = {}
        self._news = asyncio.Event()

    def add(self, asked: NodeArguments) -> None:
        """Remember a refusal."""
        self._refused.pop(asked.pod.uid, None)
        self._refused[asked.pod.uid] = _Refused(asked.pod, asked.names, self._clock.monotonic_s())
        if len(self._refused) > MOST:
            del self._refused[next(iter(self._refused))]

    def drop(self, pod: PodUid) -> None:
        """Forget a pod, since it was placed: a change of it would refuse its Binding."""
        self._refused.pop(pod, None)
        self._fitting.pop(pod, None)

    def nodes_of(self, delta: Delta[SharingPod]) -> frozenset[NodeName]:
        """Return the nodes of pods that are about to change in the index, or to leave it."""
        if not self._refused:
            return frozenset()
        known = (self._index.pod(key.namespace, key.name) for key in (*delta.changed, *delta.removed))
        return frozenset(NodeName(pod.spec.node_name) for pod in known if pod is not None and pod.spec.node_name)

    def observe(self, changed: AbstractSet[NodeName], but_beside: SharingPod | None = None) -> None:
        """Find the pods that were refused a moment ago and fit on a node that has changed.

        `but_beside` is the pod that has made room: another of its PodGroup would only be refused beside it again.
        """
        since_s = self._clock.monotonic_s() - self._late_s
        recent = {uid: refused for uid, refused in self._refused.items() if refused.at_s >= since_s}
        steps, group = Steps(MOST_STEPS), but_beside.group if but_beside is not None else None
        found = {
            uid: refused.pod
            for uid, refused in recent.items()
            if (group is None or refused.pod.group != group) and self._fits(refused, changed, steps)
        }
        self._refused = {uid: refused for uid, refused in recent.items() if uid not in found}
        self._fitting |= found
        if found:
            self._news.set()

    async def next_fitting(self) -> SharingPod:
        """Wait for a pod that was refused and fits now, and forget it."""
        while not self._fitting:
            self._news.clear()
            await self._news.wait()
        return self._fitting.pop(next(iter(self._fitting)))

    def _fits(self, refused: _Refused, changed: AbstractSet[NodeName], steps: Steps) -> bool:
        names = [name for name in refused.names if name in changed]
        if not names:
            return False
        index, pod = self._index, refused.pod
        asked, rows = NodeArguments(pod, names), index.rows_for(pod)
        return bool(filtered(asked, rows, self._sharing, index.limiting, steps=steps).node_names)
